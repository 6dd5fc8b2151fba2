"""What a network is worth: functions of outputs and labels."""
