"""What goes wrong, in the user's words: what was expected, what came, what to do. Imports nothing."""


class HetDPTError(Exception):
    """Any foreseeable failure; its text is one sentence meant for the user."""


class PlanError(HetDPTError):
    """A plan that is malformed or does not fit the model."""


class ModelError(HetDPTError):
    """A model that cannot be found, built or taken apart."""


class DataError(HetDPTError):
    """Images or labels that are missing, unreadable or do not fit the model."""


class TrainError(HetDPTError):
    """Training that was asked for wrongly, or that cannot go on."""


class DeviceError(HetDPTError):
    """A device that is not there, or has too little memory."""


class FoldError(HetDPTError):
    """Layers that have no common linear form."""


class FileError(HetDPTError):
    """A file or directory that is missing, damaged, or would be overwritten."""


class PredictError(HetDPTError):
    """Samples that no accuracy can be predicted from, or a budget that no split of it meets."""


class MeasureError(HetDPTError):
    """A measurement that was asked for wrongly."""


def first_line(error: BaseException) -> str:
    """Return what an error of another library says, without its second thoughts."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
