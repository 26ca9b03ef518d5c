"""Configuration files: strict keys, environment, readable problems."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator

from pmdaemon.errors import ConfigError
from pmdaemon.runtime import config
from pmdaemon.runtime.config import StrictModel


class Part(StrictModel):
    listen: str = "127.0.0.1:1"
    interval_s: float = Field(default=1.0, gt=0)
    api_token: str = ""


class Whole(StrictModel):
    name: str = "n"
    part: Part = Field(default_factory=Part)


def write(folder: Path, text: str) -> Path:
    path = folder / "file.toml"
    path.write_text(text)
    return path


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[part]\nlisten = "a:1"\ninterval_s = 2\n')
    loaded = config.load(
        Whole, path, environment={"SLA__PART__INTERVAL_S": "0.5", "SLA__NAME": "plain words"}
    )
    assert loaded.part.listen == "a:1"
    assert loaded.part.interval_s == 0.5
    assert loaded.name == "plain words"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[part]\nlisen = 1\n", "part.lisen: no such key; did you mean listen?"),
        ("colour = 1\n", "colour: no such key; remove it or correct its spelling"),
        ("[part]\ninterval_s = 0\n", "part.interval_s: should be above 0 (value: 0)"),
        ("name = \n", "is not TOML"),
        ("name = host-1\n", 'line 1, column 8). Write key = value, text in quotes: name = "host-1"'),
        ("a = " + "[" * 50_000, "is nested too deeply. Remove brackets"),
    ],
)
def test_a_problem_names_file_key_and_value(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        config.load(Whole, path, environment={})
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_variable_that_is_nested_too_deeply_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^SLA__NAME: is nested too deeply"):
        config.load(Whole, None, environment={"SLA__NAME": "[" * 50_000})


@pytest.mark.parametrize("names", [("SLA__PART", "SLA__PART__LISTEN"), ("SLA__PART__LISTEN", "SLA__PART")])
def test_a_variable_below_one_with_a_single_value_is_refused_by_name(names: tuple[str, str]) -> None:
    said = r"^SLA__PART__LISTEN: sets a key of \[part\], which SLA__PART sets to a single value\. Remove one"
    with pytest.raises(ConfigError, match=said):
        config.load(Whole, None, environment=dict.fromkeys(names, "x"))


@pytest.mark.parametrize("is_table_first", [True, False])
def test_a_variable_below_one_with_a_table_overrides_its_key(is_table_first: bool) -> None:
    pairs = [("SLA__PART", '{listen = "a:1", interval_s = 2}'), ("SLA__PART__LISTEN", "b:2")]
    environment = dict(pairs if is_table_first else pairs[::-1])
    loaded = config.load(Whole, None, environment=environment)
    assert (loaded.part.listen, loaded.part.interval_s) == ("b:2", 2.0)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(Whole, tmp_path / "none.toml", environment={})


def test_what_is_shown_can_be_read_back_and_hides_secrets(tmp_path: Path) -> None:
    shown = config.show(Whole(name='with "quotes"', part=Part(api_token="s3cret")))
    assert "s3cret" not in shown
    again = config.load(Whole, write(tmp_path, shown), environment={})
    assert again.name == 'with "quotes"'
    assert again.part.interval_s == 1.0


def test_the_agent_has_an_environment_of_its_own(tmp_path: Path) -> None:
    environment = {"SLA__NAME": "server", "SLA_AGENT__NAME": "agent"}
    assert config.load(Whole, None, environment=environment).name == "server"
    assert config.load(Whole, None, environment=environment, prefix=config.AGENT_ENV_PREFIX).name == "agent"


def test_a_wrong_table_is_told_without_repeating_the_table() -> None:
    class Table(config.StrictModel):
        low: int = 0
        high: int = 0

        @model_validator(mode="after")
        def _ordered(self) -> Table:
            if self.low > self.high:
                raise ValueError("low must not exceed high")
            return self

    with pytest.raises(ValidationError) as caught:
        Table.model_validate({"low": 2})
    assert config.describe(caught.value) == "(whole file): low must not exceed high"
    with pytest.raises(ValidationError) as caught:
        Table.model_validate({"low": "x"})
    assert "(value: 'x')" in config.describe(caught.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("mysql://u:secret@h/db", "mysql://u:***@h/db"),
        ("mysql://u:se/cr:et@h/db", "mysql://u:***@h/db"),
        ("mysql://u:se@cret@h/db", "mysql://u:***@h/db"),
        ("mysql://u@h:5432/db", "mysql://u@h:5432/db"),
        ("ftp://user:PW WITH SPACE@h/x", "ftp://user:***@h/x"),
        ("ftp://user:P@W WITH SPACE@h/x", "ftp://user:***@h/x"),
        ("a://u:p w@h and b://v:q r@k", "a://u:***@h and b://v:***@k"),
        ("a://u:b://p@h", "a://u:***@h"),
        ("pg://u@h/db?password=secret&x=1", "pg://u@h/db?password=***&x=1"),
        ("s3://b/p?a=1&aws_secret_access_key=secret", "s3://b/p?a=1&aws_secret_access_key=***"),
        ("pg://u:secret@h/db?sslPassword=secret#end", "pg://u:***@h/db?sslPassword=***#end"),
    ],
)
def test_a_password_in_a_wrong_url_is_not_told(url: str, told: str) -> None:
    class Table(config.StrictModel):
        url: str = Field(pattern="^sqlite")

    with pytest.raises(ValidationError) as caught:
        Table.model_validate({"url": url})
    assert f"(value: '{told}')" in config.describe(caught.value)
