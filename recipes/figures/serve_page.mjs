// node serve_page.mjs URL FOLDER: the page of a running server in headless Chromium, light and dark,
// phone and desktop, used by keyboard alone. Needs `npm install playwright-core` and a chromium.
import {chromium} from "playwright-core"

const [url, folder] = process.argv.slice(2)
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
})
const sizes = {phone: {width: 390, height: 844}, desktop: {width: 1280, height: 860}}
for (const colorScheme of ["light", "dark"]) {
  for (const [name, viewport] of Object.entries(sizes)) {
    const page = await browser.newPage({viewport, colorScheme})
    const asked = [], problems = []
    page.on("request", request => asked.push(request.url()))
    page.on("pageerror", error => problems.push(error.message))
    await page.goto(url)
    await page.keyboard.press("Tab")
    await page.keyboard.press("Tab")                                // the prompt, then the drafter
    await page.keyboard.press("Control+Enter")
    await page.waitForFunction(() => document.getElementById("same").textContent, null,
                               {timeout: 60000})
    const said = await page.evaluate(() => ({
      same: document.getElementById("same").textContent,
      rates: ["rate", "plain", "times", "accepted"].map(id => document.getElementById(id).textContent),
      wide: document.documentElement.scrollWidth - innerWidth,
      nodes: document.querySelectorAll("#tree rect").length,
    }))
    const outside = asked.filter(one => !one.startsWith(url) && !one.startsWith("data:"))
    if (!said.same.includes("same text") || said.wide > 0 || !said.nodes || outside.length ||
        problems.length)
      throw new Error(JSON.stringify({name, colorScheme, said, outside, problems}))
    console.log(name, colorScheme, JSON.stringify(said))
    await page.screenshot({path: `${folder}/serve-${name}-${colorScheme}.png`,
                           fullPage: name === "phone"})
    await page.close()
  }
}
await browser.close()
