"""Other queues, each as a program: COMMAND install | fill N | work | submit

They get DATABASE_URL and, to work, BENCH_GATE: a folder in which a worker says that it is loaded,
waits for the start, and leaves the instant of its first job and, if it ends by itself, of its end.
With BENCH_EACH set it leaves the instant of each job. A submitter finds there how long to pause
before each submission, and leaves when each of them had returned. Those that were too slow in
draining for a goal to name them cannot `fill`. Their settings are those with which they did best.
"""
