"""The flags of `kvrelay up`."""

from __future__ import annotations

import re

import pytest

from kvrelay.cli.launch_plan import COMMON_GROUPS, make_plan, parse_up_flags, up_parser
from kvrelay.cli.preflight import check_parsers
from kvrelay.cli.services import decode_parser, router_parser
from kvrelay.config import ConfigError, RouterConfig, WorkerConfig, load_config
from kvrelay.config.without_effect import ADVICE


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as raised:
        parse_up_flags(argv)
    captured = capsys.readouterr()
    return raised.value.code, captured.out, captured.err


def test_the_model_is_an_argument_or_a_flag() -> None:
    for argv in (["m/x"], ["--model", "m/x"], ["--model-path=m/x"], ["m/x", "--model=m/x"]):
        assert parse_up_flags(argv)["model"] == "m/x"
    assert parse_up_flags(["--prefill", "2", "m/x", "--no-prefix-cache"]) == {
        "model": "m/x",
        "prefill": "2",
        "prefix_cache": False,
    }
    assert parse_up_flags([]) == {}


def test_a_parser_without_a_format_here_is_refused_before_anything_starts() -> None:
    check_parsers(RouterConfig(tool_parser="qwen3_xml", reasoning_parser="deepseek-v3"))
    with pytest.raises(ConfigError, match=r"--reasoning-parser: 'granite' is no reasoning parser; known are .*qwen3"):
        check_parsers(RouterConfig(reasoning_parser="granite"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefil", "2"], "unknown flag --prefil; did you mean --prefill?"),
        (["--token-bugdet=5"], "unknown flag --token-bugdet; did you mean --token-budget?"),
        (["--qqqqqq"], "unknown flag --qqqqqq"),
        (["a", "b"], "unexpected argument 'b'"),
        (["a", "--model=b"], "two models: a and --model b"),
        (["--port"], "--port needs a value"),
        (["--api-key=x"], f"there is no --api-key: {ADVICE['--api-key']}"),
        (["--workers=2"], f"there is no --workers: {ADVICE['--workers']}"),
    ],
)
def test_an_error_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(argv, capsys)
    assert (code, out, err) == (2, "", f"kvrelay up: {message} (kvrelay up --help-all lists all flags)\n")


def test_services_suggest_flags_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(WorkerConfig, ["--max-runing=3"], prog="kvrelay decode", environ={}, role="decode")
    assert "kvrelay decode: unknown flag --max-runing; did you mean --max-running?" in capsys.readouterr().err


def test_help_shows_the_common_flags_and_help_all_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    common = {name for names in COMMON_GROUPS.values() for name in names}
    every = {action.dest for action in up_parser()._actions} - {"help", "help_all", "version", "MODEL"}
    assert common < every and 18 <= len(common) <= 26

    def shown(flag: str) -> set[str]:
        code, out, _ = run([flag], capsys)
        assert code == 0
        flags = {name.replace("-", "_") for name in re.findall(r"^  --([a-z0-9-]+)", out, re.MULTILINE)}
        return flags - {"help_all", "version"} | ({"allowed_origins"} if "allowed_origins" in flags else set())

    assert shown("--help") == common | {"config"}
    assert shown("--help-all") == every


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--max-num-seqs=9"], "max_running", 9),
        (["--max-running-requests=9"], "max_running", 9),
        (["--max-num-batched-tokens=900"], "token_budget", 900),
        (["--kv-cache-dtype=fp8"], "kv_cache_dtype", "fp8_e4m3"),
        (["--tp=2"], "tensor_parallel_size", 2),
        (["--pp-size=2"], "pipeline_parallel_size", 2),
        (["--context-length=99"], "max_model_len", 99),
        (["--page-size=32"], "block_size", 32),
        (["--no-enable-prefix-caching"], "prefix_cache", False),
        (["--chunked-prefill-size=300"], "token_budget", 300),
        (["--num-gpu-blocks-override=77"], "num_blocks", 77),
        (["--dp-size=2"], "data_parallel_size", 2),
    ],
)
def test_names_of_vllm_and_sglang_are_taken(argv: list[str], field: str, value: object) -> None:
    plan = make_plan(parse_up_flags(["org/model", *argv]), {})
    assert [getattr(worker, field) for worker in plan.workers] == [value, value]
    loaded = load_config(WorkerConfig, [*argv, "--model=org/model"], environ={}, role="decode")
    assert getattr(loaded, field) == value


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization", "--mem-fraction-static"])
def test_the_share_of_memory_by_their_names(flag: str) -> None:
    plan = make_plan(parse_up_flags(["org/model", f"{flag}=0.5"]), {})
    assert [worker.memory_utilization for worker in plan.workers] == [0.25, 0.25]


def test_advice_is_about_flags_that_do_not_exist_and_names_flags_that_do() -> None:
    parsers = [up_parser(), router_parser(), decode_parser()]
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    assert not known & ADVICE.keys()
    named = {flag for text in ADVICE.values() for flag in re.findall(r"--[a-z][a-z-]*", text)}
    assert named <= known
