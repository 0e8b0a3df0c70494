"""The plots of a report. The only folder that knows matplotlib."""
