import pytest

from gateway.prompt.blocks import PromptKey
from gateway.prompt.tokens import START_TOKENS_PER_BYTE, START_TOKENS_PER_MEDIUM, TokensPerByte


def text_key(length: int, media: int = 0) -> PromptKey:
    return PromptKey([], length, None, media)


def test_unknown_model_gets_the_start_value() -> None:
    tokens = TokensPerByte()
    assert tokens.ratio("m") == START_TOKENS_PER_BYTE
    assert tokens.estimate("m", text_key(4000)) == 1000
    assert tokens.estimate("m", text_key(400, media=2)) == 100 + 2 * START_TOKENS_PER_MEDIUM


def test_token_ids_need_no_estimate_and_teach_nothing() -> None:
    tokens = TokensPerByte()
    key = PromptKey([], 4000, 1000)
    tokens.learn("m", key, 9999)
    assert tokens.estimate("m", key) == 1000
    assert tokens.ratio("m") == START_TOKENS_PER_BYTE


def test_ratio_converges_and_models_are_apart() -> None:
    tokens = TokensPerByte()
    for _ in range(100):
        tokens.learn("dense", text_key(10_000), 4000)
    assert tokens.estimate("dense", text_key(1000)) == pytest.approx(400, rel=0.01)
    assert tokens.ratio("other") == START_TOKENS_PER_BYTE


def test_ratio_follows_a_change_of_traffic() -> None:
    tokens = TokensPerByte(memory_samples=50)
    for _ in range(500):
        tokens.learn("m", text_key(5000), 1000)
    for _ in range(300):
        tokens.learn("m", text_key(5000), 2500)
    assert tokens.ratio("m") == pytest.approx(0.5, rel=0.02)


def test_long_prompts_weigh_more_than_short_ones() -> None:
    tokens = TokensPerByte()
    for _ in range(50):
        tokens.learn("m", text_key(40_000), 8000)
        tokens.learn("m", text_key(400), 400)
    assert tokens.ratio("m") == pytest.approx(0.2, rel=0.1)


def test_one_huge_odd_prompt_does_not_speak_for_the_model() -> None:
    tokens = TokensPerByte()
    for _ in range(100):
        tokens.learn("m", text_key(10_000), 2500)
    tokens.learn("m", text_key(50_000_000), 50_000_000)
    assert tokens.ratio("m") < 0.35


@pytest.mark.parametrize(
    ("length", "prompt_tokens"), [(10_000, 0), (10_000, -5), (10_000, 50), (10_000, 30_000), (20, 20), (0, 5)]
)
def test_absurd_samples_are_ignored(length: int, prompt_tokens: int) -> None:
    tokens = TokensPerByte()
    tokens.learn("m", text_key(length), prompt_tokens)
    assert tokens.ratio("m") == START_TOKENS_PER_BYTE


def test_media_are_learned_apart_from_text() -> None:
    tokens = TokensPerByte()
    for _ in range(200):
        tokens.learn("m", text_key(4000), 1000)
        tokens.learn("m", text_key(4000, media=2), 1000 + 2 * 300)
    assert tokens.ratio("m") == pytest.approx(0.25, rel=0.01)
    assert tokens.estimate("m", text_key(4000, media=1)) == pytest.approx(1300, rel=0.02)


def test_number_of_models_is_bounded() -> None:
    tokens = TokensPerByte(max_models=2)
    for model in ("a", "b", "c"):
        for _ in range(50):
            tokens.learn(model, text_key(10_000), 5000)
    assert tokens.ratio("a") == START_TOKENS_PER_BYTE
    assert tokens.ratio("b") == pytest.approx(0.5, rel=0.05)
    assert tokens.ratio("c") == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("arguments", [{"memory_samples": 0.5}, {"max_models": 0}], ids=str)
def test_impossible_settings_are_refused(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TokensPerByte(**arguments)  # type: ignore[arg-type]
