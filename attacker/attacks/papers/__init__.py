"""Published attacks: functions that compose an attack of parts and cite its paper."""
