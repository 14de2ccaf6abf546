"""What the recipes share: the task, chat formatting, progress, pictures."""
