// graphile-worker with the settings of its own page on performance: 24 jobs at a time, a local
// queue of 500, completions in batches. A job that is done is deleted.
//   node graphile_noop.js install | fill N | work | submit
const fs = require('fs');
const path = require('path');
const { run, makeWorkerUtils, Logger } = require('graphile-worker');

const gate = (name) => path.join(process.env.BENCH_GATE, name);
const preset = {
  worker: {
    connectionString: process.env.DATABASE_URL,
    concurrentJobs: 24,
    maxPoolSize: 25,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger: new Logger(() => () => {}),
  },
};

async function start() {
  fs.writeFileSync(gate(`ready.${process.pid}`), '');
  while (!fs.existsSync(gate('go'))) await new Promise((wake) => setTimeout(wake, 2));
}

const note = (which, seq, instant) =>
  fs.appendFileSync(gate(`${which}.${process.pid}`), `${seq} ${instant}\n`);

let isFirst = true;
async function noop(payload) {
  if (process.env.BENCH_EACH) {
    note('start', payload.seq, process.hrtime.bigint());
  } else if (isFirst) {
    isFirst = false;
    fs.writeFileSync(gate(`first.${process.pid}`), String(process.hrtime.bigint()));
  }
  return payload.seq;
}

async function fill(utils, jobs) {
  const pad = 'x'.repeat(176);
  for (let first = 0; first < jobs; first += 1000) {
    const numbers = Array.from({ length: Math.min(1000, jobs - first) }, (_, i) => first + i);
    await utils.addJobs(numbers.map((seq) => ({ identifier: 'noop', payload: { seq, pad } })));
  }
}

async function submit(utils) {
  const pauses = JSON.parse(fs.readFileSync(gate('pauses.json')));
  for (const [seq, pause] of pauses.entries()) {
    await new Promise((wake) => setTimeout(wake, 1000 * pause));
    await utils.addJob('noop', { seq, pad: 'x'.repeat(176) });
    note('submitted', seq, process.hrtime.bigint());
  }
}

(async () => {
  if (process.argv[2] === 'work') {
    await start();
    const runner = await run({ preset, taskList: { noop } });
    await runner.promise;
    return;
  }
  const utils = await makeWorkerUtils({ preset });
  await utils.migrate();
  if (process.argv[2] === 'fill') await fill(utils, Number(process.argv[3]));
  if (process.argv[2] === 'submit') await submit(utils);
  await utils.release();
})();
