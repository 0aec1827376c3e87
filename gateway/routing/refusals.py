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
