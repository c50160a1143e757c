"""Other queues, each as a program: COMMAND install | fill N | work

They get DATABASE_URL and, to work, BENCH_GATE: a folder in which a worker says that it is loaded,
waits for the start, and leaves the instant of its first job and, if it ends by itself, of its end.
Their settings are those with which
they did best.
"""
