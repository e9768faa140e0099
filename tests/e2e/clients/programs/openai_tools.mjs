// The package openai of npm: tools and an output type in one run, with zod.

import OpenAI from 'openai'
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: 'none', maxRetries: 0 })
const Home = z.object({ place: z.string(), depth_m: z.number().nullable() })
const Animal = z.object({
  name: z.string(),
  kind: z.enum(['mammal', 'bird']),
  legs: z.number().int(),
  homes: z.array(Home),
})
const define = {
  name: 'define',
  description: 'Looks a word up.',
  parameters: z.object({ word: z.string(), kind: z.enum(['noun', 'verb']) }),
  function: ({ word, kind }) => `${word}, ${kind}: a mammal that swims`,
}
const today = { name: 'today', description: 'Returns the date.', parameters: z.object({}), function: () => '2026-11-28' }
const functions = { define, today }
const model = 'scripted'
const question = { role: 'user', content: 'What is an otter?' }
const chat = {
  model,
  tools: [zodFunction(define), zodFunction(today)],
  response_format: zodResponseFormat(Animal, 'animal'),
}

function show(way, called, animal) {
  console.log(`${way}: ${called.join(' ')}, ${JSON.stringify(animal)}`)
}

// By hand: each answer is parsed, the arguments of calls too.
for (const stream of [false, true]) {
  const ask = async (messages) =>
    stream
      ? await client.chat.completions.stream({ ...chat, messages }).finalChatCompletion()
      : await client.chat.completions.parse({ ...chat, messages })
  const first = (await ask([question])).choices[0].message
  const results = first.tool_calls.map((call) => ({
    role: 'tool',
    tool_call_id: call.id,
    content: functions[call.function.name].function(call.function.parsed_arguments),
  }))
  const second = (await ask([question, first, ...results])).choices[0].message
  show(stream ? 'stream' : 'parse', first.tool_calls.map((call) => call.function.name), second.parsed)
}

// By the library's loop.
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ ...chat, messages: [question], stream })
  const called = []
  runner.on('functionToolCall', (call) => called.push(call.name))
  const final = await runner.finalChatCompletion()
  show(stream ? 'runTools, streamed' : 'runTools', called, final.choices[0].message.parsed)
}

// Responses.
const response = {
  model,
  tools: [zodResponsesFunction(define), zodResponsesFunction(today)],
  text: { format: zodTextFormat(Animal, 'animal') },
}
for (const stream of [false, true]) {
  const ask = async (fields) =>
    stream
      ? await client.responses.stream({ ...response, ...fields }).finalResponse()
      : await client.responses.parse({ ...response, ...fields })
  const first = await ask({ input: 'What is an otter?' })
  const calls = first.output.filter((item) => item.type === 'function_call')
  const input = calls.map((call) => ({
    type: 'function_call_output',
    call_id: call.call_id,
    output: functions[call.name].function(call.parsed_arguments),
  }))
  const second = await ask({ input, previous_response_id: first.id })
  show(stream ? 'responses, streamed' : 'responses', calls.map((call) => call.name), second.output_parsed)
}
