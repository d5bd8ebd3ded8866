"""URIs of stores: which can be used, what is done about the others, and that no secret is shown."""

from __future__ import annotations

import pytest

from megapar.errors import ConfigError
from megapar.files import uri
from megapar.files.uri import is_stored, masked, split_uri, wrong_uri


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://bucket/a/b/", ("s3", "bucket/a/b")),
        ("S3://Bucket", ("s3", "Bucket")),
        ("memory://x", ("memory", "x")),
        ("runs/a", None),
        ("/disk/s3://x", None),
    ],
)
def test_a_uri_is_its_scheme_and_the_rest(text: str, parts: tuple[str, str] | None) -> None:
    assert split_uri(text) == parts
    assert is_stored(text) is (parts is not None)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hf://org/x", "is of no store"),
        ("s3:///x", "is not s3://BUCKET/NAME"),
        ("s3://b//x", "is not s3://BUCKET/NAME"),
        ("s3://b/../x", "is not s3://BUCKET/NAME"),
        ("s3://b/x?versionId=1", "is not s3://BUCKET/NAME"),
        ("s3://key:secret@b/x", "a user or a password"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(text: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri, "find_spec", lambda name: object())
    problem, fix = wrong_uri(text)
    assert part in problem
    assert fix
    assert wrong_uri("s3://b/x") == ("", "")


@pytest.mark.parametrize(("text", "package", "extra"), [("s3://b/x", "s3fs", "s3"), ("gs://b/x", "gcsfs", "gcs")])
def test_a_scheme_without_its_package_is_refused_with_the_line_of_pip(
    text: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uri, "find_spec", lambda name: None)
    problem, fix = wrong_uri(text)
    assert package in problem
    assert fix == f'Install it with: pip install "megapar[{extra}]"'


def test_users_and_passwords_of_uris_are_masked() -> None:
    text = "to http://me:pass@host:5000/a and s3://key:se@cret@bucket/x, not to me@host or https://host/a@b"
    assert masked(text) == "to http://***@host:5000/a and s3://***@bucket/x, not to me@host or https://host/a@b"


def test_a_password_may_contain_slashes_and_a_name_may_contain_an_at_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri, "find_spec", lambda name: object())
    assert masked("s3://AKIA:wJ/K7@bucket/run") == "s3://***@bucket/run"
    assert "a user or a password" in wrong_uri("s3://AKIA:wJ/K7@bucket/run")[0]
    for text in ("s3://bucket/a@b", "s3://bucket/a:b@c", "http://minio:9000/runs/a@b", "http://proxy:3128/x/user@host"):
        assert masked(text) == text


def test_the_case_of_a_scheme_hides_no_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uri, "find_spec", lambda name: None)
    assert uri.missing_package("S3://b/n") == uri.missing_package("s3://b/n")
    assert uri.with_both_slashes("S3:/b") == "s3://b"


def test_a_file_uri_is_a_path() -> None:
    uri.refuse_wrong("file:///a/b")
    with pytest.raises(ConfigError):
        uri.refuse_wrong("hf://a/b")
