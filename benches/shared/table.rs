//! Measurements of several kernels side by side.

use std::error::Error;
use std::io;

use serde_json::Value;

/// What the benchmark has printed on each kernel, a line of JSON each, from standard input.
pub fn read() -> Result<Vec<Value>, Box<dyn Error>> {
    let lines = io::stdin().lines().collect::<Result<Vec<_>, _>>()?;
    Ok(lines.iter().map(|line| serde_json::from_str(line)).collect::<Result<_, _>>()?)
}

/// `6.12.118` of `6.12.118+deb13-cloud-amd64`.
pub fn kernel(measured: &Value) -> &str {
    let release = measured["kernel"].as_str().unwrap_or("?");
    release.split(['+', '-']).next().unwrap_or(release)
}

/// Of two measurements; none where one of them couldn't be had.
pub fn ratio(measured: &Value, of: &str, to: &str) -> Option<f64> {
    Some(measured[of].as_f64()? / measured[to].as_f64()?)
}

/// A whole number; a dash for what couldn't be had.
pub fn whole(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"))
}

/// Two decimals; a dash for what couldn't be had.
pub fn factor(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

/// Prints rows with their columns under each other: the first to the left, numbers to the right.
pub fn print(rows: &[Vec<String>]) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}
