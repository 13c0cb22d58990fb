"""Programs of a user's own: functions that are traced and compiled with the variables and feeds that they use."""
