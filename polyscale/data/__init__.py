"""Tasks: data from files, from the Hugging Face Hub, or generated."""

from polyscale.data.tasks import TASKS, TaskData, TextSplits, load_task, load_texts, task_options

__all__ = ["TASKS", "TaskData", "TextSplits", "load_task", "load_texts", "task_options"]
