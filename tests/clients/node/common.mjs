// The client under test, and which routes the server has.
import OpenAI from "openai";

const [baseURL, apiKey] = [process.env.BASE_URL, process.env.API_KEY];

export const connect = (more = {}) => new OpenAI({ baseURL, apiKey, maxRetries: 0, ...more });
export const client = connect();

const document = await fetch(new URL("/openapi.json", baseURL), {
  headers: { Authorization: `Bearer ${apiKey}` },
});
const routes = Object.keys((await document.json()).paths);

// For node:test's `skip`: false where the route is served.
export const lacks = (route) => (routes.includes(route) ? false : `no ${route} here`);

export const collect = async (stream) => {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
};
