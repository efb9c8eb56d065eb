"""RLinf's EmbodiedRunner, with a reward group, evaluations and checkpoints."""

from report import Report

report = Report()

import os  # noqa: E402 - the imports are a part of the report

from embodied_setup import configuration, launch  # noqa: E402
from embodied_workers import Actor, Env, Reward, Rollout  # noqa: E402
from rlinf.runners.embodied_runner import EmbodiedRunner  # noqa: E402

report.part("imports")


def main() -> None:
    cfg = configuration("runner.val_check_interval=2", "runner.save_interval=4", "runner.per_worker_log=true")
    groups = launch(cfg, report, actor=Actor, rollout=Rollout, env=Env, reward=Reward)
    runner = EmbodiedRunner(cfg, **groups)
    report.watch(runner)
    runner.init_workers()
    report.part("workers")
    runner.run()
    report.part("run")
    states = {name: groups[name].state().wait() for name in ("rollout", "env", "reward")}
    saved = sorted(os.listdir(os.path.join(cfg.runner.logger.log_path, "toy", "checkpoints")))
    weights = groups["actor"].weights().wait()
    groups["reward"].stop().wait()
    report.write(weights=weights, saved=saved, **states)


if __name__ == "__main__":
    main()
