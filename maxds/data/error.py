"""What every module of this package raises."""


class DataError(ValueError):
    """Data that cannot be used as configured; one sentence with the values and the remedy."""


class UnreadableError(DataError):
    """Files that a storage does not give, or gives damaged: another time it may."""
