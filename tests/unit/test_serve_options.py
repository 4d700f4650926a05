"""`kvx.toml` and the command line of `kvx serve`: the same options, and the command line wins."""

import pytest

from kvx.errors import ConnectorError, EngineError
from kvx.serve.options import ServeOptions, merged


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def toml(tmp_path):
    def write(text, name="some.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_without_anything_the_defaults_hold():
    assert merged(None, {"prefill": None, "port": None}) == ServeOptions()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(toml):
    file = toml('prefill = 2\ndecode = 3\nmodel = "/m"\nvllm_args = ["--seed", "7"]\n')
    found = merged(file, {"decode": 1, "model": None, "vllm_args": None})
    assert (found.prefill, found.decode, found.model) == (2, 1, "/m")
    assert found.vllm_args == ["--seed", "7"]
    assert merged(file, {"vllm_args": ["--seed", "8"]}).vllm_args == ["--seed", "8"]


def test_kvx_toml_of_the_folder_is_read_unless_another_is_named(toml):
    toml("prefill = 4\n", "kvx.toml")
    assert merged(None, {}).prefill == 4
    assert merged(toml("decode = 2\n"), {}).prefill == 1


def test_names_may_have_dashes_as_on_the_command_line(toml):
    assert merged(toml("first-port = 9000\nkeep-going = true\n"), {}) == ServeOptions(first_port=9000, keep_going=True)


def test_handoff_options_of_both_are_merged_one_by_one(toml):
    file = toml('[handoff]\nverify = "all"\nlease_s = 10\n')
    assert merged(file, {"handoff": {"lease_s": 20}}).handoff == {"verify": "all", "lease_s": 20}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prefil = 1", ["'prefil'", "did you mean prefill?"]),
        ("kv-spaces = 1", ["'kv_spaces'", "did you mean kv_space?"]),
        ("zzzzz = 1", ["'zzzzz'", "there are block_size, connector"]),
        ('prefill = "two"', ["Expected `int`, got `str`", "$.prefill"]),
        ("vllm_args = [1]", ["Expected `str`, got `int`", "$.vllm_args"]),
        ("prefill = ", ["some.toml is no TOML"]),
        ("prefill = 0", ["prefill is 0", "at least one"]),
        ("port = 70000", ["port is 70000"]),
        ('device = "tpu"', ["'tpu'", "cpu or cuda"]),
        ("block_size = 0", ["block_size is 0"]),
        ("kv_space = -1", ["kv_space is -1"]),
        ('connector = " , "', ["connector is empty", "nixl"]),
        ('prefill_hosts = ["a"]', ["prefill_hosts and decode_hosts"]),
        ('decode_hosts = ["a", "b"]', ["names 2 hosts for 1 engines"]),
        ("[handoff]\nverfy = 'all'", ["'verfy'", "did you mean verify?"]),
        ("[handoff]\nconnectors = ['nixl']", ["use connector instead"]),
    ],
)
def test_what_is_wrong_is_one_sentence_that_names_it(toml, text, parts):
    with pytest.raises(EngineError) as caught:
        merged(toml(text), {})
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_hand_off_value_is_checked_before_any_engine_starts(toml):
    with pytest.raises(ConnectorError, match="lease_s"):
        merged(toml("[handoff]\nlease_s = -1\n"), {})


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(EngineError, match=r"nowhere\.toml cannot be read"):
        merged(tmp_path / "nowhere.toml", {})
