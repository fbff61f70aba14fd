import { mount } from 'svelte'
import './app.css'
import App from './App.svelte'
import { token } from './lib/api'
import { begin, page } from './lib/state.svelte'

token.take()
begin()
void page.load()
mount(App, { target: document.getElementById('page')! })
