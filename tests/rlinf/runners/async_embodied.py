"""RLinf's AsyncEmbodiedRunner: env, rollout and reward go on while the actor trains."""

from report import Report

report = Report()

from async_embodied_workers import AsyncActor, AsyncEnv, AsyncRollout  # noqa: E402 - the imports are a part
from embodied_setup import configuration, launch  # noqa: E402
from embodied_workers import Reward  # noqa: E402
from rlinf.runners.async_embodied_runner import AsyncEmbodiedRunner  # noqa: E402

report.part("imports")


def main() -> None:
    fewer = [f"cluster.component_placement.{name}='0:0'" for name in ("rollout", "reward")]
    cfg = configuration("algorithm.loss_type=embodied_sac", *fewer)
    groups = launch(cfg, report, actor=AsyncActor, rollout=AsyncRollout, env=AsyncEnv, reward=Reward)
    runner = AsyncEmbodiedRunner(cfg, **groups)
    report.watch(runner, without=("env/", "num_trajectories", "train/replay_channel_qsize"))
    runner.init_workers()
    report.part("workers")
    runner.run()
    report.part("run")
    versions = [state["version"] for state in groups["rollout"].state().wait()]
    report.write(weights=groups["actor"].weights().wait(), versions=versions)


if __name__ == "__main__":
    main()
