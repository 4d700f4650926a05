"""From options to settings, shell text and manifests: nothing is started here."""

import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest
import yaml

from kvx.errors import EngineError, LayoutError
from kvx.secret import read_secret
from kvx.serve import deployment as planning
from kvx.serve.deployment import plan
from kvx.serve.devices import deal_out
from kvx.serve.manifests import manifests
from kvx.serve.options import ServeOptions
from kvx.serve.ports import free_run
from kvx.serve.shell import script
from kvx.serve.words import last_value, world_size
from kvx.serve.yaml_text import documents
from kvx.vllm.settings import from_vllm


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    for name in ("KVX_SECRET_FILE", "KVX_SECRET", "VLLM_API_KEY", "NO_PROXY", "no_proxy", "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kvx.serve.router.is_installed", lambda: True)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return str(folder)


@pytest.fixture
def options(model):
    def make(**given):
        return ServeOptions(**{"model": model, "device": "cpu", **given})

    return make


def option(command, name):
    return command[command.index(name) + 1]


def transfer(member):
    return json.loads(option(member.engine.command(), "--kv-transfer-config"))


def shell_commands(text):
    """Variables and words of each command of a script, read as a shell would."""
    for line in text.replace("\\\n", "").splitlines():
        if line and not line.startswith("#"):
            words = shlex.split(line)
            variables = list(itertools.takewhile(lambda word: re.match(r"\w+=", word), words))
            yield dict(one.split("=", 1) for one in variables), words[len(variables) :]


def test_every_engine_has_its_name_ports_and_identity(options):
    found = plan(options(prefill=2, decode=3))
    assert [m.name for m in found.members] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    ports = [port for m in found.members for port in (m.engine.port, m.side_port)]
    ports += [found.router.port, found.router.metrics_port]
    assert len(set(ports)) == 12
    assert len({transfer(m)["engine_id"] for m in found.members}) == 5
    for member in found.members:
        extra = transfer(member)["kv_connector_extra_config"]
        assert extra == {
            "connectors": ["auto"],
            "side_channel_host": "127.0.0.1",
            "side_channel_port": member.side_port,
        }
        assert member.engine.environment["KVX_HOST_ENGINES"] == "5"


def test_what_engines_are_given_is_what_the_bridge_takes(options):
    class Transfer:
        kv_connector = "KvxConnector"
        kv_connector_extra_config = transfer(plan(options(handoff={"verify": "all", "lease_s": 9})).members[0])[
            "kv_connector_extra_config"
        ]

    class Config:
        kv_transfer_config = Transfer

    assert from_vllm(Config).verify == "all"
    assert from_vllm(Config).lease_s == 9


def test_clients_lose_the_router_first_and_prefill_last(options):
    found = plan(options(prefill=2))
    order = {m.role: m.engine.stop_order for m in found.members}
    assert found.router.stop_order < order["decode"] < order["prefill"]


def test_words_for_vllm_come_last_and_a_role_has_its_own(options):
    found = plan(options(vllm_args=["--seed", "7"], decode_args=["--max-num-seqs", "3"], prefill_args=["--x"]))
    prefill, decode = (m.engine.command() for m in found.members)
    assert prefill[-3:] == ["--seed", "7", "--x"]
    assert decode[-4:] == ["--seed", "7", "--max-num-seqs", "3"]


def test_the_model_is_called_as_its_folder_or_as_told(options, model):
    assert plan(options()).served_model_name == "some-model"
    found = plan(options(served_model_name="mine"))
    assert option(found.members[0].engine.command(), "--served-model-name") == "mine"
    assert found.members[0].engine.added_environment()["HF_HUB_OFFLINE"] == "1"


def test_a_name_of_the_hub_is_left_to_vllm_which_may_download_it(options):
    engine = plan(options(model="some-org/some-model")).members[0].engine
    assert option(engine.command(), "--model") == "some-org/some-model"
    assert "HF_HUB_OFFLINE" not in engine.added_environment()


def test_given_ports_are_counted_up_and_ranks_have_their_own(options):
    first = free_run(11, set())
    found = plan(options(first_port=first, decode_args=["-tp", "2"], port=first + 10))
    assert [m.engine.port for m in found.members] == [first, first + 1]
    assert [m.side_port for m in found.members] == [first + 2, first + 3]
    assert found.router.port == first + 10


def test_a_given_port_that_is_taken_is_one_sentence(options):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for given in ({"port": port}, {"first_port": port - 1}):
            with pytest.raises(EngineError, match=f"port {port} on 127.0.0.1 cannot be used"):
                plan(options(**given))


def test_the_default_port_gives_way_where_it_is_taken(options, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("kvx.serve.ports.DEFAULT_PORT", port)
        assert plan(options()).router.port not in (0, port)
    assert plan(options()).router.port == port


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"model": "/nowhere"}, "no model folder at /nowhere"),
        ({"model": "./nowhere"}, "/nowhere; --model needs a folder"),
        ({"model": "nowhere"}, "/nowhere; --model needs a folder"),
        ({"first_port": 65533}, "leaves no room"),
        ({"vllm_args": ["--port=1"]}, "vLLM's --port is given by kvx serve; before --, use its own --first-port"),
        ({"decode_args": ["--kv_transfer_config", "{}"]}, "use its own --connector and --handoff"),
        ({"vllm_args": ["-tp", "two"]}, "--tensor-parallel-size is 'two'"),
        ({"prefill_hosts": ["a"], "decode_hosts": ["b"]}, "add --dry-run"),
    ],
)
def test_bad_input_is_one_sentence(options, given, part):
    with pytest.raises(EngineError) as caught:
        plan(options(**given))
    assert part in str(caught.value)


def test_a_layout_that_cannot_be_moved_is_refused(options):
    with pytest.raises(LayoutError):
        plan(options(layout="LHBNC"))


def test_a_router_that_is_wanted_must_be_there_and_one_that_is_not_is_left_out(options, monkeypatch):
    assert plan(options(router=False)).router is None
    monkeypatch.setattr("kvx.serve.router.is_installed", lambda: False)
    assert plan(options()).router is None
    with pytest.raises(EngineError, match=r"pip install 'kvx\[router\]'"):
        plan(options(router=True))


def test_the_router_knows_the_engines_and_shows_them_no_foreign_key(options, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    monkeypatch.setenv("NO_PROXY", "intranet")
    found = plan(options(decode=2, router_args=["--policy", "random"]))
    command = found.router.command()
    urls = [f"http://127.0.0.1:{m.engine.port}" for m in found.members]
    assert option(command, "--prefill") == urls[0]
    assert [command[i + 1] for i, word in enumerate(command) if word == "--decode"] == urls[1:]
    assert command[-2:] == ["--policy", "random"]
    assert command.count("--policy") == 1
    assert found.router.added_environment() == {"NO_PROXY": "intranet,127.0.0.1", "OPENAI_API_KEY": ""}
    keyed = plan(options(vllm_args=["--api-key=engines"]))
    assert keyed.router.added_environment()["OPENAI_API_KEY"] == "engines"


def test_the_router_takes_the_options_that_it_is_given(options):
    pytest.importorskip("vllm_router")
    from vllm_router.launch_router import parse_router_args

    found = plan(options(prefill=2))
    taken = parse_router_args(found.router.command()[3:])
    assert [url for url, _ in taken.prefill_urls] == found.router.prefill_urls
    assert taken.decode_urls == found.router.decode_urls
    assert taken.vllm_pd_disaggregation
    assert (taken.kv_connector, taken.policy) == ("nixl", "round_robin")
    assert taken.prometheus_port == found.router.metrics_port


def test_on_a_cpu_engines_start_one_after_another(options):
    waves = plan(options(prefill=2)).waves()
    assert [[m.name for m in wave] for wave in waves] == [["prefill-0"], ["prefill-1"], ["decode-0"]]


@pytest.mark.parametrize(
    ("devices", "worlds", "dealt"),
    [
        ([0, 1, 2], [1, 1, 1], [(0,), (1,), (2,)]),
        ([4, 5], [1, 1, 1], [(4,), (5,), (4,)]),
        ([0, 1, 2, 3], [2, 1, 2], [(0, 1), (2,), (0, 1)]),
    ],
)
def test_gpus_are_dealt_out_in_order_and_then_again(devices, worlds, dealt):
    assert deal_out(devices, worlds) == dealt


def test_an_engine_with_more_ranks_than_gpus_is_one_sentence():
    with pytest.raises(EngineError, match="2 ranks needs as many GPUs, and there are 1"):
        deal_out([0], [2])


def test_engines_with_gpus_of_their_own_start_together_and_others_in_turn(options):
    share = ["--gpu-memory-utilization", "0.4"]
    found = plan(options(device="cuda", gpus=[0, 1], prefill=2, decode=1, vllm_args=share))
    assert [[m.name for m in wave] for wave in found.waves()] == [["prefill-0", "prefill-1"], ["decode-0"]]
    assert [m.engine.added_environment()["CUDA_VISIBLE_DEVICES"] for m in found.members] == ["0,1", "1,0", "0,1"]
    assert option(found.members[0].engine.command(), "--block-size") == "16"
    assert "--enforce-eager" not in found.members[0].engine.command()


def test_engines_that_share_a_gpu_must_say_how_much_each_takes(options):
    with pytest.raises(EngineError, match="prefill-0 and decode-0 share GPU 3"):
        plan(options(device="cuda", gpus=[3]))


def test_words_mean_what_vllm_takes_them_for():
    assert world_size(["-tp", "2", "--pipeline-parallel-size=3", "--tensor_parallel_size", "4"]) == 12
    assert last_value(["--a", "1", "--a=2"], ["--a"]) == "2"
    assert last_value(["--a"], ["--a"]) == ""
    assert last_value([], ["--a"]) is None


def test_the_dry_run_is_the_commands_that_would_be_run(options, monkeypatch):
    monkeypatch.setenv("KVX_SECRET_FILE", "/a folder/it's $HOME")
    found = plan(options(prefill=2, vllm_args=["--seed", "it's 7"]), only_printed=True)
    text = script(found)
    servers = [*(m.engine for m in found.members), found.router]
    assert [words for _, words in shell_commands(text)] == [server.command() for server in servers]
    assert [variables for variables, _ in shell_commands(text)] == [server.added_environment() for server in servers]
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert f"http://127.0.0.1:{found.router.port}/v1, model some-model" in text


def test_a_dry_run_needs_neither_vllm_nor_the_router_nor_the_model(monkeypatch, options):
    def refuse():
        raise EngineError("vLLM is not installed here")

    monkeypatch.setattr(planning, "require_known_vllm", refuse)
    monkeypatch.setattr("kvx.serve.router.is_installed", lambda: False)
    monkeypatch.setattr(planning, "visible_devices", list)
    found = plan(options(device=None, model="/not/here"), only_printed=True)
    assert found.router is not None
    assert [m.devices for m in found.members] == [(0,), (1,)]


ELSEWHERE = {"prefill_hosts": ["10.0.0.1"], "decode_hosts": ["10.0.0.2", "10.0.0.2"], "decode": 2}
OPEN = {"allow_unauthenticated_data_plane": True}


def test_engines_elsewhere_listen_on_their_machines_and_have_the_secret_file(options, monkeypatch, tmp_path):
    monkeypatch.setenv("KVX_SECRET_FILE", "/etc/kvx.secret")
    found = plan(options(device="cuda", handoff=OPEN, **ELSEWHERE), only_printed=True)
    assert [m.engine.host for m in found.members] == ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
    assert [m.devices for m in found.members] == [(0,), (0,), (1,)]
    assert len(found.waves()) == 1
    text = script(found)
    assert sys.executable not in text
    commands = list(shell_commands(text))
    assert len(commands) == 4
    for member, (variables, words) in zip(found.members, commands, strict=False):
        assert variables["KVX_SECRET_FILE"] == "/etc/kvx.secret"
        assert "UCX_TLS" not in variables  # which would keep it off RDMA
        assert option(words, "--host") == member.engine.host
        extra = json.loads(option(words, "--kv-transfer-config"))["kv_connector_extra_config"]
        assert extra["side_channel_host"] == member.engine.host
        assert extra["allow_unauthenticated_data_plane"] is True
    assert commands[-1][1].count("--decode") == 2


def test_engines_elsewhere_need_what_protects_them(options, monkeypatch):
    with pytest.raises(EngineError, match="allow_unauthenticated_data_plane=true"):
        plan(options(**ELSEWHERE), only_printed=True)
    with pytest.raises(EngineError, match="export KVX_SECRET_FILE"):
        plan(options(handoff=OPEN, **ELSEWHERE), only_printed=True)
    plan(options(handoff={**OPEN, "allowed_hosts": ["10.0.0.0/24"]}, **ELSEWHERE), only_printed=True)


def test_nothing_printed_shows_a_secret_of_the_environment(options, monkeypatch):
    monkeypatch.setenv("KVX_SECRET", "a-secret-that-is-long-enough")
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-the-engines")
    for text in (script(plan(options(), only_printed=True)), manifests(options())):
        assert "a-secret" not in text
        assert "a-key" not in text
    assert 'OPENAI_API_KEY="$VLLM_API_KEY"' in script(plan(options(), only_printed=True))


# Kubernetes


@pytest.fixture
def objects(options):
    def make(**given):
        found = list(yaml.safe_load_all(manifests(options(**{"model": "some-org/some-model", **given}))))
        return {(one["kind"], one["metadata"]["name"]): one for one in found}

    return make


def container_of(one):
    (container,) = one["spec"]["template"]["spec"]["containers"]
    return container


def labels_of(one):
    return one["spec"]["template"]["metadata"]["labels"]


def test_manifests_have_a_set_and_a_service_for_each_role(objects):
    assert set(objects(prefill=2, decode=3)) == {
        ("Service", "kvx-prefill"),
        ("StatefulSet", "kvx-prefill"),
        ("Service", "kvx-decode"),
        ("StatefulSet", "kvx-decode"),
        ("Service", "kvx-router"),
        ("Deployment", "kvx-router"),
        ("NetworkPolicy", "kvx-engines"),
    }


def test_the_router_lists_every_pod_by_the_name_that_its_set_gives_it(objects):
    found = objects(prefill=2, decode=3)
    command = container_of(found["Deployment", "kvx-router"])["command"]
    listed = [command[i + 1] for i, word in enumerate(command) if word in ("--prefill", "--decode")]
    expected = []
    for role in ("prefill", "decode"):
        pods = found["StatefulSet", f"kvx-{role}"]["spec"]
        service = found["Service", pods["serviceName"]]["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= pods["template"]["metadata"]["labels"].items()
        assert pods["selector"]["matchLabels"].items() <= pods["template"]["metadata"]["labels"].items()
        port = service["ports"][0]["port"]
        expected += [f"http://kvx-{role}-{n}.kvx-{role}:{port}" for n in range(pods["replicas"])]
    assert listed == expected


def test_pods_say_where_they_are_and_read_the_secret_as_kvx_demands(objects, tmp_path):
    pods = objects(device="cuda", vllm_args=["-tp", "2", "--x", "$(HOME)"])["StatefulSet", "kvx-decode"]
    spec, container = pods["spec"]["template"]["spec"], container_of(pods)
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"] if "valueFrom" in e}
    assert fields == {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    config = json.loads(option(container["command"], "--kv-transfer-config"))
    assert config["engine_id"] == "$(POD_NAME)"
    assert config["kv_connector_extra_config"]["side_channel_host"] == "$(POD_IP)"
    assert container["command"][-1] == "$$(HOME)"
    assert [p["containerPort"] for p in container["ports"]] == [8000, 5600, 5601]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert spec["enableServiceLinks"] is False
    values = {e["name"]: e["value"] for e in container["env"] if "value" in e}
    volume = next(v["secret"] for v in spec["volumes"] if "secret" in v)
    mount = next(m for m in container["volumeMounts"] if m["name"] == "secret")
    assert values["KVX_SECRET_FILE"].startswith(mount["mountPath"])
    # A file as the volume has it, behind a link: kvx reads it.
    held = tmp_path / "held"
    held.write_text("s" * 32)
    os.chmod(held, volume["defaultMode"])
    (tmp_path / "secret").symlink_to(held)
    assert read_secret({"KVX_SECRET_FILE": str(tmp_path / "secret")}) is not None


def test_only_engines_and_the_router_reach_engines(objects):
    found = objects()
    policy = found["NetworkPolicy", "kvx-engines"]["spec"]
    engine_labels = [labels_of(found["StatefulSet", f"kvx-{role}"]) for role in ("prefill", "decode")]
    router_labels = labels_of(found["Deployment", "kvx-router"])
    selected = policy["podSelector"]["matchLabels"].items()
    assert all(selected <= labels.items() for labels in engine_labels)
    assert not selected <= router_labels.items()
    among, from_router = policy["ingress"]
    assert "ports" not in among
    assert from_router["from"][0]["podSelector"]["matchLabels"].items() <= router_labels.items()
    assert from_router["ports"] == [{"port": 8000}]


def test_a_model_folder_becomes_a_claim(objects, model):
    pods = objects(model=model)["StatefulSet", "kvx-prefill"]
    assert option(container_of(pods)["command"], "--model") == "/model"
    assert option(container_of(pods)["command"], "--served-model-name") == "some-model"
    volumes = {volume["name"]: volume for volume in pods["spec"]["template"]["spec"]["volumes"]}
    assert volumes["model"]["persistentVolumeClaim"] == {"claimName": "kvx-model", "readOnly": True}


def test_manifests_need_a_model_and_choose_hosts_themselves(options):
    with pytest.raises(EngineError, match="--k8s needs --model"):
        manifests(options(model=None))
    with pytest.raises(EngineError, match="exclude each other"):
        manifests(options(**ELSEWHERE))


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": [1, True, None, {"c": [], "d": {}}, [["x"]]]}, "e": 0.5},
        {"yes": "yes", "n": "No", "empty": "", "number": "8000", "float": "1e3", "date": "2026-01-01"},
        {"colon": "a: b", "hash": "a #b", "dash": "- a", "quote": 'say "x"', "lines": "a\nb", "ö": "ü €"},
        {"a": [{"b": 1, "c": 2}, "text", {"d": [{"e": "f"}]}]},
    ],
)
def test_yaml_text_means_what_it_was_made_of(value):
    assert list(yaml.safe_load_all(documents([value, value]))) == [value, value]
