"""Random fault schedules over real processes: see `python -m tests.faults.storm --help`."""
