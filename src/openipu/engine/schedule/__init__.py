"""Pipeline schedules as tables: values that are made, checked, measured and drawn without any device."""
