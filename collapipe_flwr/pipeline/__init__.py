"""The pipeline runtime: schedules as data, stages that execute them, links between stages."""
