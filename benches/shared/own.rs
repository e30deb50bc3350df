//! `dwell` itself as a row.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use dwell::{EventView, LatencyProbe, LatencyProbeBuilder};

use crate::shared::rows::Detach;

/// Attaches a probe of one span; in the end, its histogram says what it has seen.
pub fn counted(builder: LatencyProbeBuilder) -> Result<Detach, Box<dyn Error>> {
    let probe = builder.attach()?;
    Ok(Box::new(move || seen(probe)))
}

/// Attaches a probe of one span whose filter nothing of the load passes.
#[allow(dead_code, reason = "not every benchmark has filters")]
pub fn filtered_out(builder: LatencyProbeBuilder) -> Result<Detach, Box<dyn Error>> {
    let probe = builder.attach()?;
    Ok(Box::new(move || match seen(probe)? {
        Some(0) => Ok(None),
        passed => Err(format!("the filter let {passed:?} pass").into()),
    }))
}

/// As `counted`, while a thread receives the events.
pub fn received(builder: LatencyProbeBuilder) -> Result<Detach, Box<dyn Error>> {
    let probe = builder.attach()?;
    let events = probe.events().clone();
    let receiver = thread::spawn(move || events.iter().count() as u64);
    Ok(Box::new(move || {
        let counted = seen(probe)?;
        compare(counted, receiver.join().ok());
        Ok(counted)
    }))
}

/// The same with a callback that is called for each event.
pub fn called_back(builder: LatencyProbeBuilder) -> Result<Detach, Box<dyn Error>> {
    let events = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&events);
    let probe = builder.attach_with(move |_: &EventView<'_>| {
        counter.fetch_add(1, Ordering::Relaxed);
    })?;
    Ok(Box::new(move || {
        let counted = seen(probe)?;
        compare(counted, Some(events.load(Ordering::Relaxed)));
        Ok(counted)
    }))
}

fn compare(counted: Option<u64>, received: Option<u64>) {
    if received != counted {
        eprintln!("{:<20} of {counted:?} spans that were counted, {received:?} have come as events", "");
    }
}

fn seen(probe: LatencyProbe) -> Result<Option<u64>, Box<dyn Error>> {
    let span = &probe.spans()[0];
    eprintln!("{:<20} `{}`: pairing {:?}, store {:?}", "", span.name, span.pairing, span.store);
    let count = probe.histogram(&span.name)?.count();
    let ledger = probe.stop();
    if !ledger.is_balanced() {
        return Err(format!("the ledger isn't balanced: {ledger}").into());
    }
    if ledger.spans.iter().any(|span| !span.is_lossless()) {
        eprintln!("{:<20} {ledger}", "");
    }
    Ok(Some(count))
}
