"""Secrets in a text are masked, and nothing else."""

from __future__ import annotations

import pytest
import yaml

from surogate_core.errors import ConfigError, MachineError, Problem, UserError
from surogate_core.events import Notice, Progress, RunEnd, RunInfo, RunStart
from surogate_core.masking import masked, masked_values, masked_yaml

SECRET = "s3cr3tV4lue"
"""Stands in every case where the secret does."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:SECRET@host/x.jsonl", "https://***@host/x.jsonl"),
        ("https://user:SEC@RET@host/x.jsonl", "https://***@host/x.jsonl"),
        ("mysql://user:SEC/RET@host/db", "mysql://***@host/db"),
        ("https://SECRET@host/x and http://a:SECRET@b", "https://***@host/x and http://***@b"),
        ("postgresql+psycopg2://u:SECRET@db:5432/mlflow", "postgresql+psycopg2://***@db:5432/mlflow"),
        ("s3://KEY:SECRET@bucket/x", "s3://***@bucket/x"),
        ("https://h/x?X-Amz-Credential=SECRET&X-Amz-Signature=SECRET%2F&a=1", None),
        ("https://h/x?X-Goog-Signature=SECRET", None),
        ("https://h/x?sv=2024&sig=SECRET%3D&se=1", None),
        ("https://h/?token=SECRET: 403", "https://h/?token=*** 403"),
        ("(https://h/x?access_token=SECRET&b=2)", "(https://h/x?access_token=***&b=2)"),
        ("href='https://h/x?a=1&amp;Signature=SECRET&amp;b=2'", "href='https://h/x?a=1&amp;Signature=***&amp;b=2'"),
        ("monitor.http.api_key=SECRET is not known", "monitor.http.api_key=*** is not known"),
        ("monitor.http.password='SEC RET' x", "monitor.http.password=*** x"),
        ("HF_TOKEN=SECRET surogate sft", "HF_TOKEN=*** surogate sft"),
        ('{"path": "https://u:SECRET@h/x?sig=SECRET"}', '{"path": "https://***@h/x?sig=***"}'),
    ],
)
def test_secrets_are_masked(text: str, shown: str | None) -> None:
    found = masked(text.replace("SEC", SECRET[:5]).replace("RET", SECRET[5:]))
    assert SECRET[:5] not in found
    assert SECRET[5:] not in found
    assert "***" in found
    if shown is not None:
        assert found == shown
    assert masked(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "hf://datasets/org/repo@main/x.parquet",
        "http://127.0.0.1:8080/a@b",
        "http://[::1]:80/x@y?seed=3",
        "write to me@example.com: learning_rate=1e-4 max_tokens=10 eos_token=</s> tokens=3",
        "monitor.http.password: must be a string",
        "datasets[0].path: https://host/x.jsonl?rows=3&split=train",
        "C=a@b sequence_len=12 key=3",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "part", ["://", "://a:", "?", "?token", "\n", "a.", "a_", "://u:p/", "token=", "&key=", "- ", "password: "]
)
def test_no_text_takes_long(part: str) -> None:
    """Every repetition of the patterns is bounded."""
    text = part * 5_000
    for end in ("", "=", "@", ": x", "sig=1"):
        masked(text + end)
        masked_yaml(text + end)


def test_yaml_stays_yaml() -> None:
    text = (
        "datasets:\n- path: https://u:SECRET@h/x.jsonl?sig=SECRET\n  token: SECRET\nmonitor:\n- name: http\n"
        "  api_key: SECRET\n  password: 'SECRET'\n  secret: null\neos_token: </s>\ntokens: 3\nmax_tokens: 4\n"
    )
    found = masked_yaml(text.replace("SECRET", SECRET))
    assert SECRET not in found
    values = yaml.safe_load(found)
    assert values["datasets"] == [{"path": "https://***@h/x.jsonl?sig=***", "token": "***"}]
    assert values["monitor"] == [{"name": "http", "api_key": "***", "password": "***", "secret": None}]
    assert (values["eos_token"], values["tokens"], values["max_tokens"]) == ("</s>", 3, 4)


def test_values_keep_their_shape() -> None:
    values = {"a": [1, {"hf_token": SECRET, "eos_token": "x", "n": None}], "b": ("https://u:p@h",), "secret": 3}
    expected = {"a": [1, {"hf_token": "***", "eos_token": "x", "n": None}], "b": ("https://***@h",), "secret": 3}
    assert masked_values(values) == expected


def test_errors_and_events_hold_no_secret() -> None:
    url = f"https://u:{SECRET}@host/x?X-Amz-Signature={SECRET}"
    errors = [UserError(f"{url}: 403"), MachineError(url), ConfigError([Problem(key="path", message=url, fix=url)])]
    start = RunStart(
        model=url,
        parameters=1,
        trainable_parameters=1,
        train_tokens=1,
        steps=1,
        start_step=0,
        tokens_per_step=1,
        epochs=1.0,
        device="cpu",
        notes=(url, "plain"),
    )
    end = RunEnd(
        reason="failed", step=0, seconds=0.0, first_eval_loss=None, last_eval_loss=None, export_path=None, message=url
    )
    info = RunInfo(run_name="r", output_dir="o", task="sft", config={"datasets": [{"path": url}]}, interactive=False)
    shown = [*errors, start, end, info, Notice(level="info", message=url, data={"url": url})]
    shown += [Progress(task=f"reading {url}", done=0)]
    for one in shown:
        assert SECRET not in f"{one} {one!r}"
        assert "https://***@host/x?X-Amz-Signature=***" in str(one)
    assert start.notes[1] == "plain"
