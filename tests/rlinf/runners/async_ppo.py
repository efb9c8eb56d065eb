"""RLinf's AsyncPPOEmbodiedRunner: the actor trains on rollouts that are one version old."""

from report import Report

report = Report()

from async_embodied_workers import AsyncActor, AsyncEnv, AsyncRollout  # noqa: E402 - the imports are a part
from embodied_setup import configuration, launch  # noqa: E402
from rlinf.runners.async_ppo_embodied_runner import AsyncPPOEmbodiedRunner  # noqa: E402

report.part("imports")


def main() -> None:
    cfg = configuration("algorithm.loss_type=decoupled_actor_critic", "cluster.component_placement.rollout='0:0'")
    groups = launch(cfg, report, actor=AsyncActor, rollout=AsyncRollout, env=AsyncEnv)
    runner = AsyncPPOEmbodiedRunner(cfg, **groups)
    report.watch(runner, without=("env/", "num_trajectories"))
    runner.init_workers()
    report.part("workers")
    runner.run()
    report.part("run")
    versions = [state["version"] for state in groups["rollout"].state().wait()]
    report.write(weights=groups["actor"].weights().wait(), versions=versions)


if __name__ == "__main__":
    main()
