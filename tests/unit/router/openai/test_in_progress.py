"""How many generations a router takes, how large their answers may be, and which status a failure has."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from kvrelay.config.router import RouterConfig
from kvrelay.protocol.failure_kind import FailureKind
from kvrelay.text.request.api_error import ApiError
from kvrelay.text.request.generation_fields import GenerationFields
from kvrelay.text.request.validation import RequestedOutput
from kvrelay_router.access.identity import Caller
from kvrelay_router.access.key_ring import AcceptedKeys, KeyRing
from kvrelay_router.access.rate_limiter import InProgress
from kvrelay_router.dispatch.interface import RequestFailed
from kvrelay_router.openai.api_service import ApiSettings
from kvrelay_router.openai.delivery import as_api_error
from kvrelay_router.openai.planning import AnswerShape, EndpointFields, check_answer


def num_admitted(in_progress: InProgress, stack: ExitStack, tenant: str, weight: float = 1.0, fleet: str = "") -> int:
    """Enters generations of a tenant until one is refused."""
    admitted = 0
    while True:
        try:
            stack.enter_context(in_progress.admit(Caller(tenant=tenant, weight=weight), fleet))
        except ApiError:
            return admitted
        admitted += 1


SEVERAL = KeyRing(AcceptedKeys.of(RouterConfig(api_keys=(SecretStr("one"), SecretStr("two")))))


def test_without_tenants_one_client_gets_all_places_and_gives_them_back() -> None:
    in_progress = InProgress(5)
    for _ in range(2):
        with ExitStack() as stack:
            assert num_admitted(in_progress, stack, "") == in_progress.num_requests == 5
        assert in_progress.num_requests == 0


def test_a_refusal_is_429() -> None:
    with pytest.raises(ApiError) as refused, InProgress(0).admit(Caller()):
        raise AssertionError("it was admitted")
    assert refused.value.status == 429


def test_a_flood_leaves_places_for_others() -> None:
    in_progress = InProgress(90, SEVERAL)
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "flood") == 80
        assert num_admitted(in_progress, stack, "light") >= 8
        assert num_admitted(in_progress, stack, "another") >= 1
        assert num_admitted(in_progress, stack, "flood") == 0


def test_a_fleet_that_stalls_leaves_places_for_others() -> None:
    in_progress = InProgress(90, several_fleets=True)
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "", fleet="stalled") == 80
        assert num_admitted(in_progress, stack, "", fleet="quick") >= 8
        assert num_admitted(in_progress, stack, "", fleet="stalled") == 0
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "", fleet="quick") == 80


def test_a_tenant_may_flood_one_fleet_and_not_all() -> None:
    in_progress = InProgress(90, SEVERAL, several_fleets=True)
    with ExitStack() as stack:
        assert num_admitted(in_progress, stack, "flood", fleet="a") >= 70
        assert num_admitted(in_progress, stack, "light", fleet="a") >= 1
        assert num_admitted(in_progress, stack, "light", fleet="b") >= 1
        assert num_admitted(in_progress, stack, "flood", fleet="b") == 0


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 4.0])), max_size=60))
def test_never_more_than_the_limit_and_a_tenant_with_none_gets_a_free_place(
    limit: int, arrivals: list[tuple[str, float]]
) -> None:
    in_progress = InProgress(limit, SEVERAL)
    admitted: set[str] = set()
    with ExitStack() as stack:
        for tenant, weight in arrivals:
            has_room = in_progress.num_requests < limit
            try:
                stack.enter_context(in_progress.admit(Caller(tenant=tenant, weight=weight)))
            except ApiError:
                assert not has_room or tenant in admitted
            else:
                admitted.add(tenant)
            assert in_progress.num_requests <= limit
    assert in_progress.num_requests == 0


# -- what an answer may hold is bounded before anything is queued ----------------------------------------------------


LIMIT = 64 << 20


def scored(
    num_prompts: int,
    prompt_tokens: int = 2000,
    max_tokens: int = 1,
    logprobs: int | None = 20,
    *,
    is_echoed: bool = True,
    **request: object,
) -> AnswerShape:
    """Of a completion that asks for 20 alternatives of each prompt token, and echoes its prompts with as many."""
    body = {"model": "m", "prompt_logprobs": 20, **request}
    fields = EndpointFields(
        prompt_param="prompt",
        output=RequestedOutput(asked=max_tokens, default=None),
        logprobs=logprobs,
        prompt_logprobs=None,
        echo_logprobs=20 if is_echoed else None,
        has_echo=is_echoed,
        scores_in_choices=True,
    )
    lengths = [prompt_tokens] * num_prompts
    return AnswerShape(GenerationFields.model_validate(body), fields, lengths, [max_tokens] * num_prompts)


def test_an_answer_of_hundreds_of_megabytes_is_refused_with_the_numbers() -> None:
    with pytest.raises(ApiError) as refused:
        check_answer(scored(200), LIMIT)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "answer_too_large", "logprobs")
    for number in ("200 prompts", "400000 tokens", f"{400_000 * 42 + 200 * 21} log-probabilities", str(LIMIT)):
        assert number in refused.value.message


def test_choices_count_as_often_as_the_answer_repeats_their_prompt() -> None:
    check_answer(scored(4), LIMIT)
    with pytest.raises(ApiError):
        check_answer(scored(4, n=8), LIMIT)


def test_prompt_tokens_before_the_scored_part_take_little() -> None:
    shape = scored(200, max_tokens=0, logprobs=None, is_echoed=False, logprob_start_len=1990)
    check_answer(shape, LIMIT)
    assert shape.num_scores == 200 * 11 * 21 and shape.total_bytes > 200 * 1989 * len("null,")
    with pytest.raises(ApiError):
        check_answer(scored(200, max_tokens=0, logprobs=None, is_echoed=False), LIMIT)


def test_text_alone_may_be_long() -> None:
    check_answer(scored(1, 8000, 120_000, logprobs=None, is_echoed=False, prompt_logprobs=None), LIMIT)
    with pytest.raises(ApiError) as refused:
        check_answer(scored(1, 2000, 1_048_576, logprobs=None, n=128, prompt_logprobs=None), LIMIT)
    assert refused.value.param == "n"


def test_the_output_that_fits_is_the_longest_that_is_allowed() -> None:
    shape = scored(1, 10, 131_072, n=2)
    fitting = shape.tokens_that_fit(LIMIT)
    assert 0 < fitting < 131_072
    check_answer(scored(1, 10, fitting, n=2), LIMIT)
    with pytest.raises(ApiError):
        check_answer(scored(1, 10, fitting + 1, n=2), LIMIT)


# -- the http layer takes its part of the router's config ------------------------------------------------------------


def test_settings_come_from_the_config() -> None:
    config = RouterConfig(
        model="org/name",
        api_keys=(SecretStr("one"), SecretStr("two")),
        request_timeout_s=7.0,
        max_queued_requests=5,
    )
    settings = ApiSettings.from_config(config)
    assert settings.model_name == "org/name"
    assert settings.keys.accepted.keys == ("one", "two")
    assert (settings.request_timeout_s, settings.max_requests) == (7.0, 5)


# -- every kind of failure has an http status and an error code ------------------------------------------------------


def test_codes_tell_the_kinds_apart() -> None:
    codes = [as_api_error(RequestFailed("", kind)).code for kind in FailureKind]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.DEADLINE, 504, "request_timeout"),
        (FailureKind.TOO_LARGE, 400, "exceeds_worker_capacity"),
        (FailureKind.NO_TOKEN_ALLOWED, 400, "no_token_allowed"),
        (FailureKind.GRAMMAR_FAILED, 400, "grammar_failed"),
        (FailureKind.ENGINE_ERROR, 502, "engine_error"),
        (FailureKind.NO_WORKER, 503, "no_worker_ready"),
    ],
)
def test_statuses(kind: FailureKind, status: int, code: str) -> None:
    error = as_api_error(RequestFailed("", kind))
    assert (error.status, error.code) == (status, code)
