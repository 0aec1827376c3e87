from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.metrics_page import NOTHING_SCRAPED, ScrapedState, read_metrics

# From a vLLM 0.32 replica, shortened to some families around those that are read.
VLLM_PAGE = (Path(__file__).parent / "data" / "vllm_metrics.txt").read_bytes()


def page(*lines: str) -> ScrapedState:
    return read_metrics("\n".join(lines).encode() + b"\n", 0.0)


def config(engine: int, blocks: object, block_size: object = 16, **more: object) -> str:
    labels = {"engine": engine, "num_gpu_blocks": blocks, "block_size": block_size, **more}
    return "vllm:cache_config_info{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "} 1.0"


def test_a_page_of_vllm() -> None:
    assert read_metrics(VLLM_PAGE, 12.5) == ScrapedState(
        running=3,
        waiting=2,
        kv_usage=0.25,
        prefix_queries_tokens=200.0,
        prefix_hits_tokens=64.0,
        kv_capacity_tokens=131072,
        block_size_tokens=32,
        num_gpu_blocks=4096,
        process_start_s=1795961495.06,
        scraped_at_s=12.5,
    )


@pytest.mark.parametrize("nothing", [b"", b"\n", b"<html>not found</html>", b"\x00\xff\xfe", b"# TYPE x gauge\nx 1\n"])
def test_missing_is_not_zero(nothing: bytes) -> None:
    state = read_metrics(nothing, 1.0)
    assert state == ScrapedState(scraped_at_s=1.0)
    assert state.running is None


def test_old_name_of_usage() -> None:
    assert page('vllm:gpu_cache_usage_perc{model_name="m"} 0.4').kv_usage == 0.4


def test_old_and_new_name_are_one_thing() -> None:
    state = page(
        'vllm:gpu_cache_usage_perc{engine="0"} 0.9',
        'vllm:kv_cache_usage_perc{engine="0"} 0.4',
        'vllm:gpu_prefix_cache_queries_total{engine="0"} 70',
        'vllm:prefix_cache_queries_total{engine="0"} 7',
        'vllm:gpu_prefix_cache_hits_total{engine="0"} 30',
    )
    assert (state.kv_usage, state.prefix_queries_tokens, state.prefix_hits_tokens) == (0.4, 7.0, 30.0)


@pytest.mark.parametrize("name", ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"])
def test_counters_with_and_without_total(name: str) -> None:
    assert page(f'{name}{{engine="0"}} 7').prefix_queries_tokens == 7.0


def test_engines_are_summed_and_usage_is_weighted_by_capacity() -> None:
    state = page(
        'vllm:num_requests_running{engine="0"} 3',
        'vllm:num_requests_running{engine="1"} 4',
        'vllm:num_requests_waiting{engine="0"} 1',
        'vllm:num_requests_waiting{engine="1"} 0',
        'vllm:kv_cache_usage_perc{engine="0"} 1.0',
        'vllm:kv_cache_usage_perc{engine="1"} 0.0',
        config(0, 100),
        config(1, 300),
    )
    assert (state.running, state.waiting) == (7, 1)
    assert state.kv_usage == 0.25
    assert (state.num_gpu_blocks, state.kv_capacity_tokens, state.block_size_tokens) == (400, 6400, 16)


def test_usage_is_a_plain_mean_while_capacity_is_unknown() -> None:
    state = page(
        'vllm:kv_cache_usage_perc{engine="0"} 1.0',
        'vllm:kv_cache_usage_perc{engine="1"} 0.0',
        config(0, 100),
        config(1, None),
    )
    assert state.kv_usage == 0.5
    assert state.kv_capacity_tokens == 1600


def test_labels_that_say_none() -> None:
    state = page(config(0, None, None, kv_cache_size_tokens=None))
    assert (state.kv_capacity_tokens, state.num_gpu_blocks, state.block_size_tokens) == (None, None, None)


def test_the_engines_own_figure_of_its_capacity_counts() -> None:
    # A hybrid model: with several KV groups, blocks times block size is not what the memory holds.
    assert page(config(0, 320, 8, kv_cache_size_tokens=463459)).kv_capacity_tokens == 463459


def test_longer_names_are_other_things() -> None:
    state = page(
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 5',
        'vllm:prefix_cache_queries_created{engine="0"} 1.7e9',
        'vllm:kv_cache_usage_percentile{engine="0"} 5',
        "process_start_time_seconds_total 5",
    )
    assert state == ScrapedState(scraped_at_s=0.0)


def test_values_that_are_no_numbers_are_missing() -> None:
    state = page(
        'vllm:num_requests_running{engine="0"} NaN',
        'vllm:num_requests_waiting{engine="0"} +Inf',
        'vllm:kv_cache_usage_perc{engine="0"} NaN',
    )
    assert state == ScrapedState(scraped_at_s=0.0)


def test_usage_is_a_share() -> None:
    assert page("vllm:kv_cache_usage_perc 1.02").kv_usage == 1.0


def test_braces_quotes_and_spaces_inside_labels() -> None:
    assert page(r'vllm:num_requests_running{engine="0",model_name="a} \"b\" 9 {c"} 5.0').running == 5


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0"} 5 1795961495060',
        "vllm:num_requests_running 5 0",
        'vllm:num_requests_running{engine="0"} 5 # {trace="x"} 0',
        'vllm:num_requests_running{engine="0"}\t5',
        'vllm:num_requests_running{engine="a b} 0"} 5',
        'vllm:num_requests_running{engine="a b} 0"}\t5',
        'vllm:num_requests_running{engine="0"}5',
        "vllm:num_requests_running  5 ",
        "vllm:num_requests_running{} 5\r",
    ],
)
def test_time_stamps_exemplars_and_other_spaces(line: str) -> None:
    for _ in range(2):
        assert page(line).running == 5


def test_what_is_remembered_of_a_line_is_not_its_value() -> None:
    for value in (0, 7, 3):
        assert page(f'vllm:num_requests_running{{engine="0"}} {value}').running == value


def test_malformed_lines_are_an_error_and_not_a_zero() -> None:
    with pytest.raises(ValueError):
        page('vllm:num_requests_running{engine="0"} many')
    with pytest.raises(ValueError):
        page('vllm:num_requests_running{engine="0"} 1_0')


def test_ageing_keeps_only_what_cannot_change_while_the_process_lives() -> None:
    assert read_metrics(VLLM_PAGE, 1.0).aged() == ScrapedState(
        kv_capacity_tokens=131072,
        block_size_tokens=32,
        num_gpu_blocks=4096,
        process_start_s=1795961495.06,
        scraped_at_s=1.0,
    )
    assert NOTHING_SCRAPED.aged() == NOTHING_SCRAPED


@given(
    st.sampled_from([line for line in VLLM_PAGE.split(b"\n") if not line.startswith(b"#")]),
    st.integers(0, 200),
    st.binary(max_size=8),
)
def test_damaged_pages_are_read_or_refused(line: bytes, at: int, junk: bytes) -> None:
    try:
        state = read_metrics(line[:at] + junk + line[at:], 0.0)
    except ValueError:
        return
    assert state.kv_usage is None or 0.0 <= state.kv_usage <= 1.0
    assert state.running is None or state.running >= 0
