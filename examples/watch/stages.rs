//! What `watch --list-stages` prints.

use std::io::{self, Write as _};

use dwell::{Error, Stage, StagePlan};
use serde_json::{Value, json};

/// Every stage: what it measures, and by which functions and tracepoints here, or why it can't be measured.
pub fn list(json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for &stage in Stage::ALL {
        let plan = stage.resolve();
        if json {
            writeln!(out, "{}", to_json(stage, &plan))?;
            continue;
        }
        writeln!(out, "{stage:<22} {}", stage.description())?;
        match plan {
            Ok(plan) => {
                let text = plan.to_string();
                // The line above has the name already.
                writeln!(out, "    {}", text.trim_start_matches(stage.name()).trim_start_matches(": "))?;
                plan.missing.iter().try_for_each(|reason| writeln!(out, "    missing: {reason}"))?;
            }
            Err(error) => writeln!(out, "    {error}")?,
        }
    }
    Ok(())
}

fn to_json(stage: Stage, plan: &Result<StagePlan, Error>) -> Value {
    let (name, description) = (stage.name(), stage.description());
    match plan {
        Ok(StagePlan { key, starts, ends, missing, .. }) => json!({
            "stage": name, "description": description, "error": null,
            "key": key.to_string(), "starts": starts, "ends": ends, "missing": missing,
        }),
        Err(error) => json!({ "stage": name, "description": description, "error": error.to_string() }),
    }
}
