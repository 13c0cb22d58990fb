"""The public modules and names of the original that scripts can reach below `ipu`."""

from __future__ import annotations

NAMES: dict[str, str] = {
    "": "outlined_function",
    "all_to_all_op": "all_gather all_to_all",
    "application_compile_op": "experimental_application_compile_op",
    "config": "DeviceConnectionType ExecutionProfileType IPUConfig MergeRemoteBuffersBehaviour SchedulingAlgorithm "
    "SelectionOrder StochasticRoundingBehaviour configure_ipu_system get_ipu_config reset_ipu_configuration",
    "control_flow_ops": "barrier",
    "cross_replica_ops": "assume_equal_across_replicas cross_replica_mean cross_replica_sum",
    "custom_ops": "codelet_expression_op cpu_user_operation precompiled_user_op",
    "data.ops.dataset_ops": "BufferDataset",
    "dataset_benchmark": "dataset_benchmark infeed_benchmark",
    "distributed": "allgather allreduce broadcast",
    "distributed.popdist_strategy": "PopDistStrategy",
    "eager.backprop": "GradientCaptureContext GradientCaptureTape",
    "embedded_runtime": "RuntimeContext embedded_runtime_call embedded_runtime_start embedded_runtime_start_and_call "
    "embedded_runtime_stop",
    "embedding_ops": "HostEmbedding HostEmbeddingOptimizerSpec HostEmbeddingSGDGAOptimizerSpec create_host_embedding "
    "embedding_lookup",
    "f8_ops": "Format QuarterTensor convert_from_f8 convert_to_f8 create_metadata f8_matmul",
    "functional_ops": "outlined_function",
    "grad_util_ops": "capture_upstream_gradients",
    "gradient_accumulation": "GradientAccumulationReductionMethod",
    "image_ops": "normalise_image",
    "internal_ops": "fifo get_current_iteration_counter print_tensor remap remap_deduce",
    "ipu_compiler": "compile",
    "ipu_estimator": "IPUEstimator IPUEstimatorSpec",
    "ipu_infeed_queue": "IPUInfeedQueue IPUIterator IPUOwnedIterator",
    "ipu_multi_worker_strategy": "IPUMultiWorkerStrategyV1",
    "ipu_outfeed_queue": "IPUOutfeedMode IPUOutfeedQueue ScopedIPUOutfeedQueue",
    "ipu_pipeline_estimator": "IPUPipelineEstimator IPUPipelineEstimatorSpec",
    "ipu_run_config": "IPURunConfig RunConfig",
    "ipu_session_run_hooks": "IPULoggingTensorHook",
    "ipu_strategy": "IPUStrategy IPUStrategyV1",
    "keras": "FunctionalLayerPipelineStageAssignment FunctionalNestedModelPipelineStageAssignment "
    "Model ModelLayerPipelineStageAssignment NestedModelPipelineStageAssignment PipelineModel PipelineSequential "
    "PipelineStage ReplicatedMetricReductionMethod Sequential SequentialLayerPipelineStageAssignment "
    "SequentialNestedModelPipelineStageAssignment",
    "keras.layers": "AssumeEqualAcrossReplicas CTCInferenceLayer CTCLoss CTCPredictionsLayer "
    "CaptureActivationGradients CaptureUpstreamGradients ConvertFromF8 ConvertToF8 Dense Dropout EffectiveTransformer "
    "Embedding GRU GroupNorm GroupNormalization InstanceNorm InstanceNormalization LSTM LayerNorm LayerNormalization "
    "PopnnGRU PopnnLSTM RecomputationCheckpoint SerialDense",
    "keras.optimizers": "ALSGradientAccumulationOptimizer ALSOptimizer ALSOptimizerAdam ALSOptimizerRMSProp "
    "ALSOptimizerSGD AdamIpuOptimizer GradientAccumulationOptimizer IpuOptimizerBase LAMBIpuOptimizer SGDIpuOptimizer",
    "loops": "repeat while_loop",
    "math_ops": "segment_sum serialized_matmul",
    "nn_ops": "ctc_beam_search_decoder ctc_beam_search_decoder_with_log_probs ctc_loss_v2 ctc_loss_with_log_probs gelu "
    "hard_sigmoid multi_conv nce_loss sampled_softmax_loss softmax swish",
    "normalization_ops": "group_norm instance_norm layer_norm",
    "optimizers": "CrossReplicaGradientAccumulationOptimizer CrossReplicaGradientAccumulationOptimizerV2 "
    "CrossReplicaOptimizer GradientAccumulationOptimizer GradientAccumulationOptimizerV2 IpuOptimizer "
    "MapGradientOptimizer ShardedOptimizer",
    "pipelining_ops": "OptimizerFunctionOutput PipelineSchedule PipelineStageOptions RecomputationMode pipeline "
    "recomputation_checkpoint",
    "rand_ops": "dropout",
    "reduce_scatter_op": "reduce_scatter",
    "replication_ops": "replication_index",
    "scopes": "frontend_attribute ipu_jit_scope ipu_scope ipu_shard outside_compilation_scope partials_type "
    "stochastic_rounding",
    "serving": "export_keras export_pipeline export_single_step",
    "slicing_ops": "sequence_slice sequence_slice_pack sequence_slice_unpack",
    "statistics_ops": "fixed_width_bins histogram histogram_normalize histogram_update",
    "utils": "auto_select_ipus configure_ipu_system create_ipu_config export_dataset_to_file export_inputs_to_file "
    "extract_all_strings_from_event_trace get_num_of_ipus_in_device move_variable_initialization_to_cpu reset_ipu_seed "
    "running_on_ipu_model select_ipus set_compilation_options set_convolution_options "
    "set_floating_point_behaviour_options set_gcl_options set_io_tile_options set_ipu_connection_type "
    "set_ipu_model_options set_matmul_options set_norm_options set_optimization_options set_pooling_options "
    "set_recomputation_options set_report_options set_serialization_options use_synthetic_data_for",
    "within_replica_ops": "all_gather all_reduce reduce_scatter",
}
EVERY = [(module, name) for module, names in NAMES.items() for name in names.split()]
IN_OPS = [module for module in NAMES if module.endswith(("_op", "_ops", "_runtime"))]
