"""Whether labels and a model's head speak of the same classes."""

from __future__ import annotations

from hetdpt.core.errors import DataError


def check_classes(data_classes: int, model_classes: int) -> None:
    """Refuse data whose number of classes is not that of the model's head.

    >>> check_classes(10, 10)
    """
    if data_classes != model_classes:
        raise DataError(
            f"the data has {data_classes} classes but the model's head has {model_classes}; build the model with "
            f"--num-classes {data_classes} or give the data it was trained on"
        )
