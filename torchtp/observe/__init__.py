"""What ranks did and what it cost: counts and times of calls, traces side by side, timelines."""
