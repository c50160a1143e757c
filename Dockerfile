# One image for the API, the workers and retention; docker-compose.yml says what each one runs.
FROM python:3.13-slim

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin orchestrator

WORKDIR /app
# Before the code, so that a change of the code does not install everything again.
COPY requirements.txt requirements-agents.txt ./
RUN pip install -r requirements.txt -r requirements-agents.txt
COPY . .

# The code belongs to root: the processes can read it and not change it.
USER orchestrator
EXPOSE 8000
CMD ["uvicorn", "main:app", "--host", "0.0.0.0", "--port", "8000"]
