"""Users' own programs: functions that are compiled together with the variables and feeds that they use."""
