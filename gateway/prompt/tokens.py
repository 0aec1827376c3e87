"""How many tokens a prompt has, learned from the engine's own counts.

The gateway has no tokenizer. Engines state `usage.prompt_tokens` with every answer, and the ratio of tokens
to canonical bytes is stable for one model and one kind of traffic.
"""

from gateway.prompt.blocks import PromptKey

START_TOKENS_PER_BYTE = 0.25
"""English text and common vocabularies of 100,000 and more ids: about four bytes a token."""

START_TOKENS_PER_MEDIUM = 1000.0
"""A photograph of 1 megapixel in patches of 28 x 28 pixels (Qwen2-VL, arXiv:2409.12191): 1,300 tokens."""

_PRIOR_BYTES = 4096.0  # the start value counts as much as one prompt of this length
_MIN_SAMPLE_BYTES = 128  # below, the template's own tokens outweigh the text
_MAX_SAMPLE_BYTES = 65536.0  # above, a prompt weighs no more: one odd book must not speak for the model
_MIN_RATIO, _MAX_RATIO = 0.01, 2.0  # a run of spaces; bytes that are a token or two each


class _Sums:
    """Exponentially decayed sums of one model's samples."""

    __slots__ = ("bytes", "media", "media_tokens", "tokens")

    def __init__(self) -> None:
        self.bytes = _PRIOR_BYTES
        self.tokens = _PRIOR_BYTES * START_TOKENS_PER_BYTE
        self.media = 1.0
        self.media_tokens = START_TOKENS_PER_MEDIUM


class TokensPerByte:
    """Tokens of prompts per model, as a ratio of decayed sums: long prompts weigh more than short ones."""

    def __init__(self, memory_samples: float = 200.0, max_models: int = 1024) -> None:
        """Start without knowledge of any model.

        Args:
            memory_samples: number of samples after which an old sample's weight has fallen to 1/e.
            max_models: models remembered; the one learned first is forgotten first.

        Raises:
            ValueError: if either is less than 1.
        """
        if memory_samples < 1 or max_models < 1:
            raise ValueError("memory_samples and max_models must be at least 1")
        self._keep = 1.0 - 1.0 / memory_samples
        self._max_models = max_models
        self._models: dict[str, _Sums] = {}

    def ratio(self, model: str) -> float:
        """Tokens per canonical byte of text; `START_TOKENS_PER_BYTE` for an unknown model."""
        sums = self._models.get(model)
        return START_TOKENS_PER_BYTE if sums is None else sums.tokens / sums.bytes

    def estimate(self, model: str, key: PromptKey) -> float:
        """Expected tokens of a prompt; exact when it was given as token ids."""
        if key.exact_tokens is not None:
            return float(key.exact_tokens)
        sums = self._models.get(model)
        if sums is None:
            return key.canonical_bytes * START_TOKENS_PER_BYTE + key.media * START_TOKENS_PER_MEDIUM
        tokens = key.canonical_bytes * sums.tokens / sums.bytes
        if key.media:
            tokens += key.media * sums.media_tokens / sums.media
        return tokens

    def learn(self, model: str, key: PromptKey, prompt_tokens: int) -> None:
        """Take in the engine's count for a prompt.

        Prompts given as token ids teach nothing. A prompt with media teaches the tokens of a medium; one
        of plain text the ratio, unless it is very short or its own ratio absurd (as when part of the prompt
        is not in the body).

        Args:
            model: name under which the prompt was served.
            key: the prompt.
            prompt_tokens: `usage.prompt_tokens` of the answer.
        """
        length = key.canonical_bytes
        if key.exact_tokens is not None or prompt_tokens <= 0:
            return
        if not key.media and (length < _MIN_SAMPLE_BYTES or not _MIN_RATIO <= prompt_tokens / length <= _MAX_RATIO):
            return
        sums = self._models.get(model)
        if sums is None:
            if len(self._models) >= self._max_models:
                del self._models[next(iter(self._models))]
            sums = self._models[model] = _Sums()
        keep = self._keep
        if key.media:
            text_tokens = length * sums.tokens / sums.bytes
            sums.media = sums.media * keep + key.media
            sums.media_tokens = sums.media_tokens * keep + max(0.0, prompt_tokens - text_tokens)
        else:
            weight = min(1.0, _MAX_SAMPLE_BYTES / length)
            sums.bytes = sums.bytes * keep + weight * length
            sums.tokens = sums.tokens * keep + weight * prompt_tokens
