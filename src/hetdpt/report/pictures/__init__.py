"""The pictures of a report, as plain SVG.

A picture is drawn for a width and not shrunk, so that its letters have one size on a phone and on a desk. Colours are
classes of ``templates/style.css``, and nothing is told by colour alone.
"""
