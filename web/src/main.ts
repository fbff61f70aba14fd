import { mount } from 'svelte'
import './app.css'
import App from './App.svelte'
import { begin, page } from './lib/state.svelte'

begin()
void page.load()
mount(App, { target: document.getElementById('page')! })
