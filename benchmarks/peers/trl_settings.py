"""What TRL's trainers have in common in all benchmarks: float32 on the CPU, and nothing written."""

CPU_TRAINER = {
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
}
