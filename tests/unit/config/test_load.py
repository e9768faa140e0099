"""One config object from a file, the environment and flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvrelay.config import ConfigError, RouterConfig, WorkerConfig, load_config
from kvrelay.config.common import demo_model_path
from kvrelay.config.loader import resolve
from kvrelay.config.up_config import UpConfig
from kvrelay.worker.startup import graph_sizes

MODEL = {"KVRELAY_MODEL": "org/model"}


def worker(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None, role: str = "decode") -> WorkerConfig:
    return load_config(WorkerConfig, argv, environ={**MODEL, **(environ or {})}, role=role)


def router(argv: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> RouterConfig:
    return load_config(RouterConfig, argv, environ={**MODEL, **(environ or {})})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvrelay.toml"
    path.write_text(
        """
        token_budget = 1000
        log_level = "warning"
        max_attempts = 9

        [worker]
        token_budget = 2000
        block_size = 32

        [decode]
        block_size = 64

        [router]
        log_level = "error"
        api_keys = ["one", "two"]
        """
    )
    return path


# -- precedence -------------------------------------------------------------------------------------------------------


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    config = ["--config", str(file)]
    assert worker(config).token_budget == 2000
    assert worker(config, {"KVRELAY_TOKEN_BUDGET": "3000"}).token_budget == 3000
    assert worker([*config, "--token-budget=4000"], {"KVRELAY_TOKEN_BUDGET": "3000"}).token_budget == 4000


def test_tables_of_the_file_hold_for_their_processes(file: Path) -> None:
    config = ["--config", str(file)]
    assert worker(config, role="decode").block_size == 64
    assert worker(config, role="prefill").block_size == 32
    assert worker(config).log_level == "warning"
    assert router(config).log_level == "error"
    assert router(config).max_attempts == 9


def test_the_environment_can_name_the_file(file: Path) -> None:
    assert worker(environ={"KVRELAY_CONFIG": str(file)}).token_budget == 2000


def test_empty_variables_count_as_unset() -> None:
    assert worker(environ={"KVRELAY_TOKEN_BUDGET": ""}).token_budget == 512


def test_up_counts_workers_in_its_own_table(tmp_path: Path) -> None:
    path = tmp_path / "k.toml"
    path.write_text("[up]\nprefill = 3\n[prefill]\ntoken_budget = 2048\n")
    assert resolve(UpConfig, {"config": str(path)}, {}).prefill == 3
    assert worker(["--config", str(path)], role="prefill").token_budget == 2048


# -- values -----------------------------------------------------------------------------------------------------------


def test_values_are_typed() -> None:
    config = worker(
        ["--kv-memory-bytes=512MiB", "--num-blocks=7", "--no-prefix-cache", "--peer-timeout-s=2.5", "--device=cuda:1"]
    )
    assert config.kv_memory_bytes == 512 << 20
    assert config.num_blocks == 7
    assert config.prefix_cache is False
    assert config.peer_timeout_s == 2.5
    assert config.device == "cuda:1"


def test_the_swap_space_is_a_size_and_for_decode_workers_alone() -> None:
    assert worker(["--swap-space=2GiB"]).swap_space == 2 << 30
    values = {"model": "m", "swap_space": 1 << 30}
    decode = WorkerConfig.model_validate(values | {"role": "decode"})
    assert decode.swap_bytes == 1 << 30
    assert WorkerConfig.model_validate(values | {"role": "prefill"}).swap_bytes == 0
    assert WorkerConfig.model_validate(values | {"role": "decode", "preemption": "recompute"}).swap_bytes == 0
    assert WorkerConfig.model_validate({"model": "m", "role": "decode"}).swap_bytes is None


def test_switches_from_the_environment() -> None:
    assert worker(environ={"KVRELAY_PREFIX_CACHE": "false"}).prefix_cache is False
    assert worker(["--prefix-cache"], {"KVRELAY_PREFIX_CACHE": "false"}).prefix_cache is True


def test_lists_are_separated_by_commas() -> None:
    keys = router(environ={"KVRELAY_API_KEYS": "one, two"}).api_keys
    assert [key.get_secret_value() for key in keys] == ["one", "two"]


def test_each_start_gets_a_worker_id_of_its_role() -> None:
    names = {worker(role="prefill").worker_id for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch(r"prefill-[0-9a-f]{8}", name) for name in names)


def test_the_demo_model_is_the_default_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(WorkerConfig, [], environ={}, role="decode").model == str(demo_model_path())
    assert load_config(WorkerConfig, [], environ={}, role="decode").served_model_name == "kvrelay-demo"
    monkeypatch.setattr("kvrelay.config.common.demo_model_path", lambda: None)
    with pytest.raises(ConfigError, match=r"--model"):
        load_config(WorkerConfig, [], environ={}, role="decode")


def test_the_served_name_follows_the_model(tmp_path: Path) -> None:
    (tmp_path / "otter-1b").mkdir()
    (tmp_path / "otter-1b" / "config.json").write_text("{}")
    assert worker([f"--model={tmp_path}/otter-1b/"]).served_model_name == "otter-1b"
    assert worker(["--model=org/name"]).served_model_name == "org/name"
    assert worker(["--model=org/name", "--served-model-name=x"]).served_model_name == "x"


def test_a_model_has_one_name_or_several(tmp_path: Path) -> None:
    assert worker(["--model=org/name"]).model_names == ("org/name",)
    several = worker(["--model=org/name", "--served-model-name=a, b/c,a"])
    assert (several.model_names, several.model_name) == (("a", "b/c"), "a")
    (tmp_path / "one,two").mkdir()
    (tmp_path / "one,two" / "config.json").write_text("{}")
    assert worker([f"--model={tmp_path}/one,two"]).model_names == ("one,two",)


@pytest.mark.parametrize("names", ["", "a,", ",a", "a, ,b", "a," + "b" * 201])
def test_empty_and_long_names_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match=r"served.model.name"):
        worker(["--model=org/name", f"--served-model-name={names}"])


def test_a_wildcard_address_is_not_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "machine-7")
    assert worker().reachable_host == "127.0.0.1"
    assert worker(["--host=0.0.0.0"]).reachable_host == "machine-7"
    assert worker(["--host=::"]).reachable_host == "machine-7"
    assert worker(["--host=0.0.0.0", "--advertise-host=10.0.0.5"]).reachable_host == "10.0.0.5"


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        worker().token_budget = 1  # type: ignore[misc]


# -- bad values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [
        ("--token-budget=0", "1 to 1048576"),
        ("--block-size=24", "power of two: 8, 16, 32, 64 or 128"),
        ("--memory-utilization=0", "more than 0, at most 1"),
        ("--num-blocks=1", "2 or more"),
        ("--swap-space=-1", "0 to 16TiB"),
        ("--kv-memory-bytes=1KiB", "1MiB or more"),
        ("--redis=localhost", "redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"),
        ("--worker-id=a b", "1 to 64 of the characters"),
        ("--model=/no/such/place", "there is no directory"),
    ],
)
def test_a_bad_value_names_its_flag_and_what_is_allowed(flag: str, allowed: str) -> None:
    name, value = flag.split("=")
    with pytest.raises(ConfigError) as raised:
        worker([flag])
    message = str(raised.value)
    assert name in message
    assert value in message
    assert allowed in message
    assert ";" not in message  # nothing else is wrong


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        worker(["--token-budget=0", "--num-blocks=0"])
    assert "--token-budget" in str(raised.value)
    assert "--num-blocks" in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--max-running=600"], ("max_running (600)", "token_budget (512)")),
        (["--preemption=swap", "--swap-space=0"], ("preemption = swap", "swap_space above 0")),
    ],
)
def test_values_that_do_not_fit_together_are_both_named(argv: list[str], names: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as raised:
        worker(argv)
    assert all(name in str(raised.value) for name in names)


def test_which_sizes_are_captured() -> None:
    assert graph_sizes(worker(["--max-running=20", "--no-jump-forward"])) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(worker(["--max-running=300"]))[-2:] == (288, 300)
    few = ["--max-running=2"]
    assert graph_sizes(worker(few)) == (1, 2, 4, 8, 16, 24, 32, 34)
    assert graph_sizes(worker([*few, "--no-jump-forward", "--speculation=ngram"])) == (1, 2, 4, 8, 16, 24, 32, 34)
    assert graph_sizes(worker([*few, "--no-jump-forward"])) == (1, 2)
    assert graph_sizes(worker(["--max-running=20"]))[-1] == 256
    assert graph_sizes(worker(["--max-running=20", "--token-budget=64"]))[-1] == 64
    assert graph_sizes(worker(["--no-cuda-graphs"])) == ()
    assert graph_sizes(worker(role="prefill")) == ()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "data_parallel_size = 4 and tensor_parallel_size|tensor_parallel_size = 2 and data_parallel_size = 4"),
        (
            ["--tensor-parallel-size=1", "--data-parallel-rank=4", "--rank-port=7"],
            r"data_parallel_rank = 4 of .*0 to 3",
        ),
        (["--tensor-parallel-size=1", "--data-parallel-rank=1"], "data_parallel_rank = 1 needs the rank_port"),
        (["--tensor-parallel-size=1", "--local-ranks=4"], r"local_ranks = 4 .*allowed: 0 to 3"),
        (["--tensor-parallel-size=1", "--local-ranks=1"], "local_ranks = 1 needs a rank_port"),
        (["--tensor-parallel-size=1", "--quantization=int8"], "rounded weights are not divided: data_parallel_size"),
        (["--tensor-parallel-size=1", "--data-parallel-size=65"], "1 to 64"),
        (["--tensor-parallel-size=1", "--backend=simulated", "--num-workers=2"], "one group of data_parallel_size"),
        (["--tensor-parallel-size=1", "--backend=simulated", "--port=7"], "must be 0"),
    ],
)
def test_sizes_of_data_parallel_groups_that_cannot_be_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker(["--tensor-parallel-size=2", "--data-parallel-size=4", *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-fused-layers"], "batch_invariant needs fused_layers"),
        (["--device=cuda:1", "--tensor-parallel-size=2"], "needs one rank: .*: tensor_parallel_size = 2"),
        (["--device=cuda", "--data-parallel-size=2"], "needs one rank: .*: data_parallel_size = 2"),
    ],
)
def test_batch_invariant_logits_are_refused_where_they_cannot_be(flags: list[str], message: str) -> None:
    assert worker(["--enable-deterministic-inference", "--tensor-parallel-size=2"]).batch_invariant
    with pytest.raises(ConfigError, match=message):
        worker(["--batch-invariant", *flags])


def test_the_workers_of_a_data_parallel_group_have_ids_of_their_own() -> None:
    config = worker(["--worker-id=d", "--data-parallel-size=3"])
    assert config.rank_worker_ids == ["d", "d-dp1", "d-dp2"]
    assert config.started_worker_ids == {"d", "d-dp1", "d-dp2"}
    assert [each.worker_id for each in config.each_worker()] == ["d"]
    other = worker(["--worker-id=d-dp2", "--data-parallel-size=3", "--data-parallel-rank=2", "--rank-port=7"])
    assert other.rank_worker_ids == config.rank_worker_ids
    assert (other.num_local_ranks, config.num_local_ranks) == (0, 2)
    simulated = worker(["--worker-id=d", "--data-parallel-size=3", "--backend=simulated"])
    assert [(each.worker_id, each.data_parallel_rank) for each in simulated.each_worker()] == [
        *(("d", 0), ("d-dp1", 1), ("d-dp2", 2))
    ]


def test_the_prefill_delayer_is_for_workers_that_run_both_phases() -> None:
    assert worker(["--prefill-delayer"]).prefill_delayer
    with pytest.raises(ConfigError, match="prefill_delayer needs a worker that runs both phases"):
        worker(["--prefill-delayer"], role="prefill")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("token_bugdet = 1", "token_bugdet is not a known field"),
        ("[router]\ntoken_budget = 1", r"\[router\] token_budget is not a known field"),
        ("worker = 3", "worker must be a table"),
        ("token_budget = ", "is not valid TOML"),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "k.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        worker(["--config", str(path)])


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.toml: No such file"):
        worker(["--config", str(tmp_path / "nowhere.toml")])


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(SystemExit):
        worker(["--token", "5"])


# -- secrets and help -------------------------------------------------------------------------------------------------


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nalpha\n\n  beta  \n")
    config = router([f"--api-keys-file={path}"], {"KVRELAY_API_KEYS": "gamma,delta"})
    assert [key.get_secret_value() for key in config.api_keys] == ["gamma", "delta", "alpha", "beta"]


def test_a_key_file_without_keys_does_not_open_the_door(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        router([f"--api-keys-file={path}"])
    with pytest.raises(ConfigError, match="cannot read"):
        router(["--api-keys-file=/no/such/file"])


def test_keys_cannot_be_given_as_a_flag() -> None:
    with pytest.raises(SystemExit):
        router(["--api-keys=secret"])


def test_secrets_are_masked_wherever_a_config_is_shown() -> None:
    config = router(["--redis=redis://user:s3cret@host:1/0"], {"KVRELAY_API_KEYS": "k3y"})
    shown = str(config.printable())
    assert "s3cret" not in shown
    assert "k3y" not in shown
    assert "redis://user:**********@host:1/0" in shown


def test_help_describes_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        worker(["--help"])
    text = capsys.readouterr().out
    for name, field in WorkerConfig.model_fields.items():
        if name != "role":
            assert f"--{name.replace('_', '-')}" in text
            assert field.description
    words = " ".join(text.split())
    assert "1 to 1048576; default: 512" in words and "(0 to 63; default: all)" in words
    assert "2GiB; 0: none (0 to" not in words and "(default: )" not in words


# -- Redis' password --------------------------------------------------------------------------------------------------


def test_redis_password_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(" p/w:d@1 \n")
    given = {"KVRELAY_REDIS_PASSWORD_FILE": str(path)}
    assert router(environ=given).redis_url == "redis://:p%2Fw%3Ad%401@127.0.0.1:6379/0"
    own = given | {"KVRELAY_REDIS_URL": "redis+sentinel://user@a:1,b:2/name/3"}
    assert worker(environ=own).redis_url == "redis+sentinel://user:p%2Fw%3Ad%401@a:1,b:2/name/3"
    kept = given | {"KVRELAY_REDIS_URL": "redis://:mine@a:1"}
    assert worker(environ=kept).redis_url == "redis://:mine@a:1"
    assert "p%2Fw" not in str(router(environ=given).printable())


def test_a_password_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, complaint in ((empty, "is empty"), (tmp_path / "missing", "cannot read")):
        with pytest.raises(ConfigError, match=f"redis_password_file: .*{complaint}|{complaint} .*missing"):
            router(environ={"KVRELAY_REDIS_PASSWORD_FILE": str(path)})
