// Parses what users type. Pure functions; each throws an Error that names the text and the wanted form.

const BINARY = { kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30, tib: 2 ** 40 };
const UNITS = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12, ...BINARY };

/** "8 GiB" → bytes. */
export function parsedBytes(text) {
  const [, number, unit] = text.trim().match(/^([\d.]+)\s*([a-zA-Z]*)$/) ?? [];
  const size = Number(number) * (UNITS[unit?.toLowerCase()] ?? NaN);
  if (!(size >= 1)) throw new Error(`"${text}" is not a size: write it as 8 GiB`);
  return Math.round(size);
}

/** "65 %" → 0.65. The sign is required, because 0.25 could mean a quarter or 0.25 %. */
export function parsedShare(text) {
  const [, number] = text.trim().match(/^([\d.]+)\s*%$/) ?? [];
  const share = Number(number ?? NaN) / 100;
  if (!(share >= 0 && share <= 1)) throw new Error(`"${text}" is not a share: write it as 65 %`);
  return share;
}

export function parsedWhole(text) {
  const n = Number(text.trim());
  if (!Number.isInteger(n) || n < 0 || !text.trim()) throw new Error(`"${text}" is not a whole number`);
  return n;
}
