"""Bad input to the command: one clear sentence, a non-zero status, and no engine is ever started."""

import contextlib
import json
import re
import shlex
import socket
import sys

import pytest

from kvx import inject
from kvx.cli import app, main
from kvx.errors import EngineError
from kvx.verify.bench import BenchSettings
from kvx.verify.engines import RunSettings
from kvx.verify.questions import own_problems, own_shots
from kvx.verify.runner import VerifySettings


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("an engine was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def kvx(monkeypatch, capfd):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["kvx", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capfd.readouterr()
        return ended.value.code, " ".join(re.sub(r"[│╭╮╰╯─]", " ", said.out + said.err).split())

    return call


def test_version(kvx):
    assert kvx("--version") == (0, "kvx 0.1.0")


def require_sentence(result, *parts):
    code, said = result
    assert code == 1
    assert "Traceback" not in said
    assert said.startswith("kvx: ")
    for part in parts:
        assert part in said


def test_unknown_connector_names_the_known_ones(kvx, model):
    require_sentence(kvx("verify", "--model", model, "--connector", "nixl,carrier-pigeon"), "carrier-pigeon", "nixl")


def test_no_connector_at_all_is_refused(kvx, model):
    code, said = kvx("verify", "--model", model, "--connector", " , ")
    assert code == 2
    assert "at least one name" in said


def test_connector_that_is_not_installed_says_which_extra(kvx, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    monkeypatch.delitem(sys.modules, "kvx_connectors.nixl", raising=False)
    require_sentence(kvx("verify", "--model", model), "pip install 'kvx[nixl]'")


@pytest.mark.parametrize("by", ["option", "environment"])
def test_unknown_layout_names_the_known_ones(kvx, model, monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHDX")
    options = ("--layout", "NHDX") if by == "option" else ()
    require_sentence(kvx("verify", "--model", model, *options), "NHDX", "LBHNC", "NHD")


def test_layout_without_compact_blocks_is_refused(kvx, model):
    require_sentence(kvx("verify", "--model", model, "--layout", "LHBNC"), "LHBNC", "LBNHC")


def test_places_that_cannot_be(kvx, model, tmp_path):
    where = tmp_path / "places.toml"
    require_sentence(kvx("verify", "--model", model, "--places", where), "places.toml cannot be read")
    where.write_text('[decode]\nprefix = ["ip", "netns", "exec", "far"]\n')
    code, said = kvx("verify", "--model", model, "--places", where, "--connector", "cpu_offload")
    assert code == 2
    assert "one engine, here" in said


def test_missing_and_malformed_datasets(kvx, tmp_path, model):
    require_sentence(kvx("verify", "--dataset", tmp_path / "no.jsonl"), "no.jsonl", "No such file")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "q", "answer": "#### 1"}\n{"question": "q"}\n')
    require_sentence(kvx("verify", "--dataset", bad), "line 2 of", "'answer'")
    require_sentence(kvx("verify", "--few-shot", bad), "line 2 of")


def test_model_folder_without_weights(kvx, tmp_path, model):
    (model / "model.safetensors").unlink()
    require_sentence(kvx("verify", "--model", model), "no weights")
    (model / "config.json").unlink()
    require_sentence(kvx("verify", "--model", model), "no config.json")
    require_sentence(kvx("bench", "pd", "--model", tmp_path / "gone"), "no model folder")


def test_port_in_use(kvx, model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        require_sentence(kvx("verify", "--model", model, "--first-port", port), f"port {port}", "cannot be used")


def test_unknown_vllm(kvx, model, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "0.40.1")
    require_sentence(kvx("verify", "--model", model), "0.40.1", "0.32, 0.33")


def test_unwritable_report_is_known_before_the_run(kvx, model, tmp_path):
    (tmp_path / "file").write_text("")
    require_sentence(kvx("verify", "--model", model, "--report", tmp_path / "file" / "r.json"), "cannot be written")


def test_unknown_injection_and_impossible_lengths_are_usage_errors(kvx, model):
    code, said = kvx("verify", "--inject", "gremlin")
    assert code == 2
    assert "flip-byte" in said
    assert app.INJECTIONS == inject.INJECTIONS  # which is not imported there: torch takes a second
    code, said = kvx("bench", "pd", "--prompt-tokens", "4000")
    assert code == 2
    assert "--max-model-len" in said


def test_every_option_of_verify_reaches_the_run(kvx, model, monkeypatch, tmp_path):
    seen = []

    def verify(settings, _progress):
        seen.append(settings)
        raise EngineError("stop here")

    monkeypatch.setattr(app, "verify", verify)
    monkeypatch.setattr(app, "require_known_vllm", lambda: "cuda")
    options = "--connector nixl --limit 5 --shots 2 --max-tokens 7 --concurrency 3 --no-judge-answers --inject stale"
    options += " --dtype bfloat16 --block-size 32 --max-model-len 512 --kv-space 3 --explicit-size 40 --layout HND"
    options += f" --device cuda --gpus 1,0 --logs {tmp_path / 'logs'}"
    given = ["--engine-args", "--attention-backend TRITON_ATTN --seed '7'"]
    require_sentence(kvx("verify", "--model", model, *options.split(), *given), "stop here")
    (settings,) = seen
    assert settings == VerifySettings(
        run=RunSettings(
            model=model,
            connectors=("nixl",),
            dtype="bfloat16",
            block_size_tokens=32,
            max_model_len_tokens=512,
            kv_space_gib=3,
            explicit_blocks=40,
            layout="HND",
            inject="stale",
            device="cuda",
            eager=False,
            arguments=("--attention-backend", "TRITON_ATTN", "--seed", "7"),
            gpus=("1", "0"),
        ),
        problems=own_problems()[:5],
        shots=own_shots()[:2],
        max_tokens=7,
        concurrency=3,
        judge_answers=False,
        logs=tmp_path / "logs",
    )


@pytest.mark.parametrize(("device", "block_size", "eager"), [("cpu", 128, True), ("cuda", 16, False)])
def test_the_device_sets_what_is_not_given(kvx, model, monkeypatch, device, block_size, eager):
    seen = []
    monkeypatch.setattr(app, "require_known_vllm", lambda: device)
    monkeypatch.setattr(app, "verify", lambda settings, _progress: seen.append(settings.run) or 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        kvx("verify", "--model", model)
    (run,) = seen
    assert (run.device, run.block_size_tokens, run.eager) == (device, block_size, eager)
    assert run.start_one_by_one == (device == "cuda")


def test_engine_arguments_that_are_no_words_are_refused(kvx, model):
    code, said = kvx("verify", "--model", model, "--engine-args", "--seed '7")
    assert code == 2
    assert "--engine-args" in said
    assert "No closing quotation" in said


@pytest.mark.parametrize("words", ["--device cuda --gpus 0", "--device cuda --gpus 0,", "--device cpu --gpus 0,1"])
def test_gpus_are_two_and_not_of_a_cpu(kvx, model, words):
    code, said = kvx("verify", "--model", model, *words.split())
    assert code == 2
    assert "--gpus" in said


def test_every_option_of_bench_reaches_the_run(kvx, model, monkeypatch):
    seen = []

    def bench_pd(settings, _progress):
        seen.append(settings)
        raise EngineError("stop here")

    monkeypatch.setattr(app, "bench_pd", bench_pd)
    options = "--pairs 2 --requests 3 --prompt-tokens 50 --new-tokens 4 --kv-space 0 --explicit-size 40 --no-eager"
    given = ["--engine-args", "--seed 7"]
    require_sentence(kvx("bench", "pd", "--model", model, *options.split(), *given), "stop here")
    run = RunSettings(model=model, explicit_blocks=40, kv_space_gib=None, eager=False, arguments=("--seed", "7"))
    assert seen == [BenchSettings(run=run, pairs=2, requests=3, prompt_tokens=50, new_tokens=4)]


def test_status_follows_the_verdict_and_the_report_is_written(kvx, model, monkeypatch, tmp_path):
    found = {
        "questions": 1,
        "identical": 1,
        "accuracy": {"baseline": 1.0, "candidate": 1.0},
        "transfer": {"bytes": 1, "blocks": 1},
        "offload": {"stores": 3, "evictions": 2, "reloads": 1, "loaded_bytes": 5},
        "digests": {"mismatches": []},
        "memory": {"peak_bytes": 1},
        "duration_s": 1.0,
        "differences": [],
        "conditions": [{"name": "no fallbacks", "holds": True, "detail": "0"}],
    }
    monkeypatch.setattr(app, "verify", lambda _settings, _progress: found)
    for passed, status in ((True, 0), (False, 1)):
        found["passed"] = passed
        code, said = kvx("verify", "--model", model, "--report", tmp_path / "r.json")
        assert code == status
        assert "1 of 1 identical" in said
        assert ("not every condition holds" in said) is not passed
        assert json.loads((tmp_path / "r.json").read_text()) == found


def test_missing_extra_says_what_to_install(kvx, monkeypatch):
    monkeypatch.delitem(sys.modules, app.__name__)
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in [name for name in sys.modules if name.startswith(("rich.", "kvx.cli.show"))]:
        monkeypatch.delitem(sys.modules, name)
    code, said = kvx("verify")
    assert "pip install 'kvx[cli]'" in code
    assert said == ""


# kvx serve: nothing is started by these either


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_serve_prints_what_kvx_toml_says_and_the_command_line_wins(kvx, in_a_folder, model):
    (in_a_folder / "kvx.toml").write_text(
        f"model = '{model}'\ndevice = 'cpu'\nserved-model-name = 'from-file'\nvllm_args = ['--seed', '7']\n"
    )
    code, said = kvx("serve", "--dry-run")
    assert code == 0
    assert said.count("--seed 7") == 2
    assert "--served-model-name from-file" in said.replace("\\ ", "")
    code, said = kvx("serve", "--dry-run", "--served-model-name", "mine", "--decode", 2, "--", "--seed", "8")
    assert code == 0
    assert said.count("--seed 8") == 3
    assert "from-file" not in said


def test_the_example_of_serve_works(kvx, in_a_folder, model):
    code, said = kvx("serve", "--help")
    assert code == 0
    example = re.search(r"Example: kvx (serve .*?)\. ", said)
    assert example is not None
    words = shlex.split(example[1])
    code, said = kvx(*words[:1], "--dry-run", "--model", model, "--device", "cpu", *words[1:])
    assert code == 0
    assert said.count("--max-num-seqs 8") == 2


def test_serve_prints_manifests(kvx, in_a_folder):
    code, said = kvx("serve", "--k8s", "--model", "some-org/some-model", "--handoff", "verify=all")
    assert code == 0
    assert "kind: StatefulSet" in said
    assert '\\"verify\\": \\"all\\"' in said


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--handoff", "verfy=all"], "did you mean verify?"),
        (["--config", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["--prefill", "0"], "prefill is 0"),
        (["--prefill-hosts", "a", "--decode-hosts", "b"], "add --dry-run"),
        (["--k8s"], "--k8s needs --model"),
    ],
)
def test_serve_says_what_is_wrong_in_one_sentence(kvx, in_a_folder, model, words, part):
    given = [] if "--k8s" in words else ["--model", model, "--device", "cpu"]
    require_sentence(kvx("serve", *given, *words), part)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["stray"], "'stray' is no option"),
        (["--handoff", "verify"], "NAME=VALUE"),
        (["--gpus", "a,b"], "for example 0,1"),
        (["--router-args", "'"], "No closing quotation"),
        (["--prefil", "1"], "No such option"),
    ],
)
def test_serve_names_the_option_that_is_wrong(kvx, in_a_folder, words, part):
    code, said = kvx("serve", *words)
    assert code == 2
    assert part in said
