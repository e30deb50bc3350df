//! Ctrl-C, as something to wait for.

use crossbeam_channel::{Receiver, bounded};

/// Once it has been pressed, there is a message.
pub fn interrupted() -> Result<Receiver<()>, ctrlc::Error> {
    let (interrupt, interrupted) = bounded(1);
    ctrlc::set_handler(move || {
        let _ = interrupt.try_send(());
    })?;
    Ok(interrupted)
}
