"""The recipes for clusters: scripts run with stand-ins of their programs, YAML fits a schema, commands are parsed.

A stand-in of torchrun writes what it was called with; torchrun's own parser, then heddle's, must accept that.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from torch.distributed.run import get_args_parser

from heddle.cli import main
from tests.docs.test_snippets import parse_command
from tests.source import ROOT

RECIPES = ROOT / "examples" / "cluster"
RECORD = """#!/usr/bin/env bash
printf '%s\\0' "$(basename "$0")" "$@" >> {folder}/calls
printf '\\n' >> {folder}/calls
"""
# Options of sbatch and what their values look like.
SBATCH = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks": r"\d+", "ntasks-per-node": r"\d+", "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+", "time": r"\d+:\d\d:\d\d", "signal": r"[A-Z]+@\d+", "requeue": "", "open-mode": "append",
    "array": r"\d+-\d+", "output": r"[\w%.-]+",
}  # fmt: skip


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., list[list[str]]]:
    """Run a command with stand-ins of the cluster's programs; return what torchrun and heddle were called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {
        "torchrun": RECORD.format(folder=tmp_path),
        "heddle": RECORD.format(folder=tmp_path),
        "scontrol": '#!/usr/bin/env bash\necho "$3" | tr , "\\n"\n',
        # every node runs the command
        "srun": "#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\n"
        'for ((SLURM_NODEID = 0; SLURM_NODEID < SLURM_NNODES; SLURM_NODEID++)); do export SLURM_NODEID; "$@"; done\n',
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(command: list[str], **variables: str) -> list[list[str]]:
        environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(tmp_path), **variables}
        subprocess.run(command, env=environment, check=True, cwd=tmp_path, timeout=60)
        lines = (tmp_path / "calls").read_text().split("\0\n")[:-1]
        return [line.split("\0") for line in lines]

    return run


def torchrun_options(words: list[str]) -> Any:
    """What torchrun makes of its arguments; those of heddle are checked too."""
    assert words[0] == "torchrun"
    options = get_args_parser().parse_args(words[1:])
    assert options.module
    assert options.training_script == "heddle"
    parse_command(" ".join(options.training_script_args))
    return options


def test_two_nodes(call: Callable[..., list[list[str]]]) -> None:
    script = ["bash", str(RECIPES / "torchrun_two_nodes.sh")]
    for node in ("0", "1"):
        calls = call([*script, node, "10.0.0.1", "preset:gqa-tiny", "--data", "books"], RUN="runs/mine")
    nodes = [torchrun_options(words) for words in calls]
    assert [options.node_rank for options in nodes] == [0, 1]
    for options in nodes:
        assert (options.nnodes, options.nproc_per_node, options.master_addr) == ("2", "8", "10.0.0.1")
        assert (options.rdzv_backend, options.rdzv_endpoint) == ("static", "")
        assert options.training_script_args[-2:] == ["--out", "runs/mine"]


def test_a_slurm_job(call: Callable[..., list[list[str]]]) -> None:
    job = {"SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n7,n8"}
    job |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "64"}
    calls = call(["bash", str(RECIPES / "train.sbatch"), "preset:gqa-tiny", "--out", "runs/a b"], **job)
    nodes = [torchrun_options(words) for words in calls]
    assert [options.node_rank for options in nodes] == [0, 1]
    assert {(options.master_addr, options.master_port, options.nproc_per_node) for options in nodes} == {
        ("n7", 23456, "4")
    }
    assert nodes[0].training_script_args == ["train", "preset:gqa-tiny", "--out", "runs/a b"]


def test_an_array_of_slurm_jobs(call: Callable[..., list[list[str]]]) -> None:
    command = ["bash", str(RECIPES / "compare_array.sbatch"), "preset:mha-tiny", "preset:gqa-tiny"]
    [words] = call(command, SLURM_CPUS_PER_TASK="8", SLURM_NNODES="1")
    assert words == ["heddle", "compare", "preset:mha-tiny", "preset:gqa-tiny", "--threads", "8", "--quiet"]
    parse_command(" ".join(words[1:]))


@pytest.mark.parametrize("script", sorted(path.name for path in [*RECIPES.glob("*.sbatch"), *RECIPES.glob("*.sh")]))
def test_scripts_are_correct_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(RECIPES / script)], check=True, timeout=60)
    text = (RECIPES / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text
    for line in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        name, _, value = line.removeprefix("--").partition("=")
        assert re.fullmatch(SBATCH[name], value), line


def fields(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    """The schema of an object with these fields and no other."""
    properties = {**required, **optional}
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}


def a_list(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": schema}


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"}
QUANTITY = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(Ki|Mi|Gi|Ti|m)?$"}]}
RESOURCES = {"type": "object", "additionalProperties": QUANTITY, "propertyNames": {"enum": ["cpu", "memory", "nvidia.com/gpu"]}}  # fmt: skip  # noqa: E501
METADATA = fields({"name": NAME}, namespace=NAME, labels={"type": "object", "additionalProperties": TEXT})
COMMAND = a_list(TEXT)
CONTAINER = fields(
    {"name": NAME, "image": TEXT},
    env=a_list(fields({"name": TEXT, "value": TEXT})),
    volumeMounts=a_list(fields({"name": NAME, "mountPath": {"type": "string", "pattern": "^/"}})),
)
VOLUME = fields(
    {"name": NAME}, persistentVolumeClaim=fields({"claimName": NAME}), emptyDir=fields({}, medium={"const": "Memory"})
)
POD = fields({"containers": a_list(CONTAINER)}, volumes=a_list(VOLUME), terminationGracePeriodSeconds=COUNT)
# The names of Trainer and Kueue: trainer.kubeflow.org/trainjob-ancestor-step says which job has the trainer's pods.
JOB = fields({"name": NAME, "template": fields({"metadata": fields({"labels": {"type": "object"}}),
              "spec": fields({"template": fields({"spec": POD})})})})  # fmt: skip
FLAVOR = fields({"name": NAME, "resources": a_list(fields({"name": TEXT, "nominalQuota": QUANTITY}))})
SPECS = {
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): None,
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): fields(
        {
            "namespaceSelector": fields({}),
            "resourceGroups": a_list(fields({"coveredResources": a_list(TEXT), "flavors": a_list(FLAVOR)})),
        }
    ),
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): fields({"clusterQueue": NAME}),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): fields(
        {
            "mlPolicy": fields({"numNodes": COUNT, "torch": fields({}, numProcPerNode=COUNT)}),
            "template": fields({"spec": fields({"replicatedJobs": a_list(JOB)})}),
        }
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): fields(
        {
            "runtimeRef": fields({"apiGroup": TEXT, "kind": TEXT, "name": NAME}),
            "trainer": fields(
                {"numNodes": COUNT, "command": COMMAND, "args": COMMAND},
                resourcesPerNode=fields({"requests": RESOURCES, "limits": RESOURCES}),
            ),
        }
    ),
}
SKY = fields(
    {"name": NAME, "num_nodes": COUNT, "resources": fields({"accelerators": TEXT}, disk_size=COUNT), "run": TEXT},
    workdir=TEXT,
    setup=TEXT,
    envs={"type": "object", "additionalProperties": TEXT},
    file_mounts={
        "type": "object",
        "additionalProperties": fields({"name": NAME, "mode": {"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}}),
    },
)


def manifest_errors(document: Mapping[str, Any]) -> list[str]:
    """Why a document of kubernetes.yaml is none of Kueue's or Trainer's, as sentences."""
    kind = (document["apiVersion"], document["kind"])
    if kind not in SPECS:
        return [f"{kind} is unknown"]
    spec = SPECS[kind]
    head = {"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA}
    schema = fields(head if spec is None else {**head, "spec": spec})
    return [error.message for error in Draft202012Validator(schema).iter_errors(document)]


def test_kubernetes() -> None:
    documents = list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))
    assert [manifest_errors(document) for document in documents] == [[]] * 5
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(SPECS)
    job, runtime, queue = (by_kind[kind] for kind in ("TrainJob", "TrainingRuntime", "LocalQueue"))
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    assert queue["spec"]["clusterQueue"] == by_kind["ClusterQueue"]["metadata"]["name"]
    [group] = by_kind["ClusterQueue"]["spec"]["resourceGroups"]
    assert group["flavors"][0]["name"] == by_kind["ResourceFlavor"]["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert {*trainer["resourcesPerNode"]["requests"]} <= {*group["coveredResources"]}
    torchrun_options([*trainer["command"], *trainer["args"]])
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        each["name"] for each in pod["volumes"]
    }


def test_a_wrong_manifest_is_noticed() -> None:
    text = (RECIPES / "kubernetes.yaml").read_text()
    for right, wrong in (("numNodes: 2", "nodes: 2"), ("512Gi", "512 GB"), ("mountPath: /shared", "mountPath: shared")):
        assert right in text
        assert any(manifest_errors(document) for document in yaml.safe_load_all(text.replace(right, wrong)))


def test_skypilot(call: Callable[..., list[list[str]]]) -> None:
    task = yaml.safe_load((RECIPES / "skypilot.yaml").read_text())
    assert [error.message for error in Draft202012Validator(SKY).iter_errors(task)] == []
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
    calls = call(["bash", "-ec", task["run"]], SKYPILOT_NODE_RANK="1", **sky, **task["envs"])
    options = torchrun_options(calls[0])
    assert (options.node_rank, options.nnodes, options.master_addr) == (1, "2", "10.0.0.4")


def test_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    trainers: list[dict[str, Any]] = []
    exit_code = 0

    class TorchTrainer:
        """A stand-in of Ray's: it runs the loop once, in this process."""

        def __init__(self, loop: Callable[[Any], None], **options: Any) -> None:
            self.loop, self.options = loop, options
            trainers.append(options)

        def fit(self) -> None:
            self.loop(json.loads(json.dumps(self.options["train_loop_config"])))

    def run_command(arguments: list[str]) -> int:
        calls.append(arguments)
        return exit_code

    names = ("FailureConfig", "RunConfig", "ScalingConfig")
    train = ModuleType("ray.train")
    for name in names:
        setattr(train, name, SimpleNamespace)
    torch = ModuleType("ray.train.torch")
    vars(torch).update(TorchTrainer=TorchTrainer, TorchConfig=SimpleNamespace)
    for module in (ModuleType("ray"), train, torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(main, "run_command", run_command)
    arguments = ["--workers", "4", "preset:gqa-tiny", "--data", "books", "--out", "runs/mine"]
    monkeypatch.setattr(sys, "argv", ["ray_train.py", *arguments])
    namespace: dict[str, Any] = {"__name__": "ray_train"}
    exec(compile((RECIPES / "ray_train.py").read_text(), "ray_train.py", "exec"), namespace)
    namespace["main"]()
    assert calls == [["train", "preset:gqa-tiny", "--data", "books", "--out", "runs/mine"]]
    parse_command(" ".join(calls[0]))
    assert trainers[0]["scaling_config"] == SimpleNamespace(num_workers=4, use_gpu=False)
    assert trainers[0]["torch_config"].backend == "gloo"
    exit_code = 2
    with pytest.raises(RuntimeError, match="heddle train ended with code 2"):
        namespace["main"]()
