"""Pipeline schedules as tables: values that can be made, checked, measured and drawn without any device."""
