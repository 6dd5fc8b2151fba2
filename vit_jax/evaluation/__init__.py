"""Accuracy, few-shot, nearest neighbours, logistic regression: functions of outputs and labels."""
