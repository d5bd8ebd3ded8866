"""Ranks that do not answer or are late: the watchdog, its reports, stragglers."""
