"""Launch files: their syntax, and that every command in them names files, configs, settings and meshes that exist."""

import math
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from kimi_jax import cli
from kimi_jax.analysis import sizes
from kimi_jax.train import loop

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
FILES = ("slurm.sbatch", "gke-jobset.yaml", "skypilot.yaml", "Dockerfile")
TEXT = {name: (DEPLOY / name).read_text() for name in FILES}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def asked(monkeypatch):
    """Parses a command's arguments with the real command line; gives the config that it would train."""

    def parse(arguments: str):
        configs = []
        monkeypatch.setattr(loop, "run_training", lambda config, **options: configs.append(config))
        cli.train(shlex.split(arguments))
        return configs[0]

    return parse


def value(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    assert found, pattern
    return found[1]


def check(config, devices: int) -> None:
    """The mesh takes all devices, and the config fits it."""
    assert config.mesh.size == devices
    assert "parameters" in sizes.dry_run(config)


@pytest.mark.parametrize("name", FILES)
def test_the_three_lines_to_edit_come_first(name):
    lines = TEXT[name].splitlines()
    (marked,) = (number for number, line in enumerate(lines) if "Edit these three lines" in line)
    assert marked < 10
    edited = {
        "slurm.sbatch": ("#SBATCH --nodes", "VENV=", "RUN="),
        "gke-jobset.yaml": ("kimi-jax/image: &image", "kimi-jax/topology: &topology", "kimi-jax/run: &run"),
        "skypilot.yaml": ("resources: {accelerators", "RUN:", "SHARE:"),
        "Dockerfile": ("ARG PYTHON=", "ARG EXTRA=", "ARG USER_ID="),
    }[name]
    following = [line.strip() for line in lines[marked + 1 : marked + 7]]
    assert all(any(line.startswith(start) for line in following) for start in edited), following


def test_slurm_script(asked):
    text = TEXT["slurm.sbatch"]
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sbatch"], check=True)
    directives, body = re.fullmatch(r"((?:#.*\n)+)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    assert "#SBATCH" not in body, "Slurm reads no directive after the first command"
    options = dict(option.split("=") for option in re.findall(r"--(\S+=\S+)", directives))
    # JAX gives each of Slurm's tasks one GPU.
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    assert options["signal"].startswith("TERM@"), "to the tasks; B:TERM would reach the script alone"
    assert (ROOT / value(r"srun .*python -u (\S+) \$RUN", text)).is_file()
    check(asked(value(r'^RUN="(.*)"$', text)), int(options["nodes"]) * int(options["gpus-per-node"]))


def test_gke_jobset(asked):
    job_set = yaml.safe_load(TEXT["gke-jobset.yaml"])
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert all(isinstance(note, str) for note in job_set["metadata"]["annotations"].values())
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert spec["parallelism"] == spec["completions"] == chips // container["resources"]["limits"]["google.com/tpu"]
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never", "the job set begins again as a whole"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert re.fullmatch(r".+:(?!latest$)[\w.-]+", container["image"])
    (environment,) = container["env"]
    (script,) = container["args"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert script.index("trap") < script.index("python"), "on process 1 an untrapped SIGTERM is lost"
    entry, rest = re.search(r"python -u (\S+) \$RUN (.*?) &", script).groups()  # type: ignore[union-attr]
    assert f"ARG USER_ID={pod['securityContext']['fsGroup']}\n" in TEXT["Dockerfile"], "who writes to the volume"
    assert (ROOT / entry).is_file() and f"COPY pyproject.toml README.md LICENSE {entry}" in TEXT["Dockerfile"]
    config = asked(f"{environment['value']} {rest}")
    assert config.train.runs_dir == container["volumeMounts"][0]["mountPath"]
    check(config, chips)


@pytest.mark.parametrize("name", ["gke-jobset.yaml", "skypilot.yaml"])
@pytest.mark.parametrize(
    ("ending", "record", "failing"),
    [(0, "final", False), (0, "train", True), (3, "final", True)],
    ids=["finished", "preempted", "failed"],
)
def test_scripts_tell_finished_from_preempted(tmp_path, name, ending, record, failing):
    """With a stand-in for Python that ends as told, of itself or on SIGTERM."""
    task = yaml.safe_load(TEXT[name])
    if name == "gke-jobset.yaml":  # its bash gets the signal and hands it on
        pod = task["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        script, target = pod["containers"][0]["args"][0], "$PPID"
    else:
        script, target = task["run"], "$$"
    script = script.replace("/runs", str(tmp_path))
    (tmp_path / "k3_tiny").mkdir()
    (tmp_path / "k3_tiny" / "metrics.jsonl").write_text(f'{{"step": 1, "kind": "{record}"}}\n')
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    wait = f"kill -TERM {target}; sleep 5 > /dev/null 2>&1 & wait" if record == "train" else ""
    python.write_text(f"#!/bin/bash\ntrap 'echo saved; exit {ending}' TERM\n{wait}\nexit {ending}\n")
    python.chmod(0o755)
    home = {"HOME": str(tmp_path), "PATH": f"{python.parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        env=home | {"RUN": "k3_tiny --mesh.fsdp 16"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert bool(done.returncode) == failing, done.stderr
    assert ("saved" in done.stdout) == (record == "train")


def test_skypilot_file(asked):
    task = yaml.safe_load(TEXT["skypilot.yaml"])
    assert task.keys() <= {"name", "resources", "envs", "file_mounts", "workdir", "setup", "run", "num_nodes"}
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert value(r"pip install .*-e '\.\[(\w+)\]'", task["setup"]) in EXTRAS
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert value(r"uv venv .*--python (\S+)", task["setup"]) == lowest
    assert task["resources"]["job_recovery"]["max_restarts_on_errors"] > 0, "a run that saved and stopped goes on"
    assert "file_mounts" not in task, "a bucket renames a checkpoint file by file"
    runs = value(r'mount -t nfs "\$SHARE" (\S+) \|\| exit', task["setup"])
    entry, rest = re.search(r"python -u (\S+) \$RUN (.*?) &&", task["run"]).groups()  # type: ignore[union-attr]
    assert (ROOT / entry).is_file()
    config = asked(f"{task['envs']['RUN']} {rest}")
    assert config.train.runs_dir == runs
    check(config, int(value(r"tpu-\w+-(\d+)", task["resources"]["accelerators"])))


def test_dockerfile(asked):
    instructions = []
    for line in TEXT["Dockerfile"].splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            instructions.append((name, rest))
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions} <= known
    (base,) = (rest for name, rest in instructions if name == "FROM")
    assert ":" in base and "latest" not in base
    declared = {rest.partition("=")[0] for name, rest in instructions if name == "ARG"}
    assert set(re.findall(r"\$\{(\w+)\}", TEXT["Dockerfile"])) <= declared
    assert value(r"^ARG EXTRA=(\w+)", TEXT["Dockerfile"]) in EXTRAS
    copied = [part for name, rest in instructions if name == "COPY" for part in rest.split()[:-1]]
    assert all((ROOT / part).exists() for part in copied)
    (entry,) = (yaml.safe_load(rest) for name, rest in instructions if name == "ENTRYPOINT")
    (command,) = (yaml.safe_load(rest) for name, rest in instructions if name == "CMD")
    assert entry[:2] == ["python", "-u"] and entry[2] in copied
    assert asked(shlex.join(command)).name == "k3_tiny"
    # What the build reads of the project must be there too: the package, its configs, its readme and its licence.
    assert {"pyproject.toml", "README.md", "LICENSE", "kimi_jax", "configs"} <= set(copied)
    assert 'pip install --no-cache-dir -e ".[${EXTRA}]"' in TEXT["Dockerfile"]


def test_readme_names_every_file_and_its_commands_parse(asked):
    readme = (DEPLOY / "README.md").read_text()
    assert {path.name for path in DEPLOY.iterdir()} == {*FILES, "README.md"}
    assert all(f"`{name}`" in readme for name in FILES)
    for command in re.findall(r"train_main\.py (k3_tiny.*?)(?: &)?$", readme, re.MULTILINE):
        check(asked(command), 8)
