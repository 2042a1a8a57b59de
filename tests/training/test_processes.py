import pytest
from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from polyscale.training import processes
from polyscale.training.processes import decide_on_main, join_processes


def launched(monkeypatch, *arguments):
    """Give this process the environment of the one that `accelerate launch` starts on a CPU."""
    for name in (*processes._WORLD_SIZES, "MASTER_ADDR", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    parser = launch.launch_command_parser()
    parsed = parser.parse_args(["--cpu", *arguments, "train.py"])
    parsed, _, _ = launch._validate_launch_command(parsed)
    _, environment = prepare_simple_launcher_cmd_env(parsed)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_the_lone_process_of_a_launch_that_asked_for_two_is_refused(monkeypatch):
    launched(monkeypatch, "--num_processes=2")
    with pytest.raises(ValueError, match=r"must start several processes, got one.* use torchrun"):
        join_processes()


def test_a_launch_of_one_process_is_one_process(monkeypatch):
    launched(monkeypatch, "--num_processes=1")
    assert join_processes().num_processes == 1


def test_processes_that_mpi_starts_are_left_to_accelerate(monkeypatch):
    launched(monkeypatch, "--num_processes=2")
    monkeypatch.setenv("PMI_SIZE", "2")
    processes._refuse_lone_process(processes.os.environ)


def test_one_process_decides_for_itself():
    assert decide_on_main(lambda: 3) == 3
    with pytest.raises(FileNotFoundError, match="gone"):
        decide_on_main(lambda: (_ for _ in ()).throw(FileNotFoundError("gone")))
