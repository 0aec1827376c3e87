"""Why a request gets no replica."""


class UnknownModel(LookupError):
    """No replica has ever listed the model."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.model = model


class NoReplica(LookupError):
    """The model is known, but no replica can take the request now."""


class Saturated(NoReplica):
    """Replicas could, but each has as many requests as it may have."""


class TargetsOutOfReach(NoReplica):
    """No replica is predicted to keep the request's latency targets, and it is to be refused then.

    Attributes:
        retry_after_s: predicted whole seconds until one would, within bounds.
    """

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class InvalidTarget(ValueError):
    """A latency target in a header is not one.

    Attributes:
        header: its name.
    """

    def __init__(self, header: str) -> None:
        super().__init__(header)
        self.header = header
