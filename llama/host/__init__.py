"""What this machine is: its cores, its memory, its control groups, and where files go."""
