"""Errors for the user: what was expected, what was given, what to do. Imports nothing."""


class HetDPTError(Exception):
    """Any foreseeable failure; its text is one sentence meant for the user."""


class PlanError(HetDPTError):
    """A plan that is malformed or does not fit the model."""


class ModelError(HetDPTError):
    """A model that cannot be found, built or taken apart."""


class DataError(HetDPTError):
    """Images or labels that are missing, unreadable or do not fit the model."""


class TrainError(HetDPTError):
    """Training with wrong settings, or that cannot continue."""


class DeviceError(HetDPTError):
    """A device that is not available, or has too little memory."""


class FoldError(HetDPTError):
    """Layers that have no common linear form."""


class FileError(HetDPTError):
    """A file or directory that is missing, damaged, or would be overwritten."""


class PredictError(HetDPTError):
    """Samples from which no accuracy can be predicted, or a budget that no split meets."""


class MeasureError(HetDPTError):
    """A measurement with wrong settings."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
