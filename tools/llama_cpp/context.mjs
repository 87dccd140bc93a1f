// Makes a context of llama.cpp on a GGUF and writes what llama.cpp logs meanwhile, such as the sizes of its caches.
//
//   {"model": "model.gguf", "contextSize": 1024, "sequences": 1, "batchSize": 512}
//
// on standard input; the answer is a JSON list of lines.

import process from "node:process";
import {getLlama} from "node-llama-cpp";

const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const {model: modelPath, ...options} = JSON.parse(Buffer.concat(chunks).toString("utf-8"));
const lines = [];
const logger = (level, message) => lines.push(message.trimEnd());
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: "debug", logger, progressLogs: false});
const model = await llama.loadModel({modelPath});
await (await model.createContext({threads: 1, ...options})).dispose();
process.stdout.write(JSON.stringify(lines), () => process.exit(0)); // exiting sooner would cut a long answer
