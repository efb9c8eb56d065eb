"""Members of classes of rlinf.scheduler that those of rlinf_actors lack. Only data, for rlinf_actors.dropin.check.

``python -m tests.rlinf.write_members`` writes it from a checkout of RLinf.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlinf_actors.dropin.table import INTERNAL, Absent


def _internal(names: str) -> dict[str, Absent]:
    return dict.fromkeys(names.split(), INTERNAL)


MEMBERS: Mapping[str, Mapping[str, Absent]] = {
    "Worker": _internal(
        """
        PID _actor _check_initialized _collective _comm_devices _device_lock _enable_ptrace
        _env_setup_before_init _get_collective_group _has_initialized _is_ray_actor _isolate_gpu _lock
        _logging_level _master_address _master_port _node_group _port_lock _register_signal_handlers
        _setup_accelerator_info _setup_comm_envs _setup_hardware _setup_local_rank_world_size _setup_logging
        _setup_managers _setup_master_address_and_port _setup_worker_info _stacklevel _thread
        _trace_category _worker_info global_accelerator_ids
        """
    ),
    "WorkerGroup": _internal(
        """
        WorkerRank _attach_cls_func _catch_system_failure _cluster _create_workers _data_io_ranks
        _disable_distributed_log _execution_ranks _group_size _isolate_gpu _max_concurrency
        _placement_strategy _worker_cls _worker_cls_args _worker_cls_kwargs _worker_group_name _world_size
        launch
        """
    ),
    "WorkerGroupFuncResult": _internal(
        """
        _cls_name _func_name _local_results _pid _remote_results _wait_done _wait_for_results _wait_thread
        _worker_group
        """
    ),
    "Cluster": _internal(
        """
        LOGGING_LEVEL _cluster_cfg _coll_manager _combine_ray_runtime_env _dedupe_path_entries
        _device_lock_manager _distributed_log_collector _get_default_profiling_output_prefix
        _get_manager_node _has_initialized _infer_rlinf_repo_root_for_ray_working_dir
        _init_and_launch_managers _init_from_existing_managers _install_failure_hook _instance
        _job_code_sync_fragment_for_child_runtime_env _launch_manager_actor _logger _net_emulation_manager
        _node_groups _node_manager _node_probe _paths_equivalent_for_code_sync _port_lock_manager
        _prepare_ray_code_sync_runtime_env_fragment _ray_code_sync_fragment _ray_instance_count
        _resolve_explicit_abs_path_to_repo_and_rlinf _run_failed _runtime_code_sync_strip_roots
        _sanitize_worker_name_for_path _set_scheduler_env_vars _setup_logger _shutdown_ray_at_exit
        _split_path_entries _strip_sync_roots_from_pythonpath _tracer _worker_manager
        """
    ),
    "Channel": _internal(
        """
        _channel_name _channel_worker_group _current_worker _get_channel_actor _get_channel_rank_by_key
        _get_src_node_rank _key_to_channel_rank_cache _local_channel _local_channel_id
        _main_channel_worker_actor local_channel_map
        """
    ),
    "ComponentPlacement": _internal(
        """
        _gen_node_placement _gen_resource_placement _parse_component_placement _parse_rank_map
        _placement_config _rank_map_to_process_resources_map
        """
    ),
    "PackedPlacementStrategy": _internal(
        """
        _node_group_labels _num_hardware _resolve_node_groups
        """
    ),
}
"""For each class the members that it lacks."""
